"""Starting, watching and stopping the ranks of a job. Knows no framework."""
