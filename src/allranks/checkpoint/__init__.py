"""The checkpoint on disk: its format, its commit, the search for the newest whole one,
its export."""
