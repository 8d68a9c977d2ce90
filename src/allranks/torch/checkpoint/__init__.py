"""Checkpoints that cannot be torn: `checkpointer` saves and loads, the rest are its parts."""
