"""Branches of one model on different ranks: their placement, and how they run in parallel."""
