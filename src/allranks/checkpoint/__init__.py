"""The checkpoint on disk: its format, commit, search for the newest whole one, and export."""
