"""What the checkpoints of all engines share: the commit, the search for the newest whole one."""
