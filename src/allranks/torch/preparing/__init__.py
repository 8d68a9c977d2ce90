"""Before the ranks start: what one process finds out for `--strategy auto`."""
