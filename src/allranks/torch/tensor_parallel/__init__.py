"""Tensor parallelism: which layers are cut, what the cut ones compute, and what they exchange."""
