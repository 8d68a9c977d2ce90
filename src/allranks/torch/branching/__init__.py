"""Branches of one model on different ranks: who runs which, and how they run at the same time."""
