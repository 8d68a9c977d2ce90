"""Flat tensors in fewer bytes, and what was left out kept for the next time."""
