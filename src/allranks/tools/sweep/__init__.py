"""Many jobs on one machine, each in a slot of its own."""
