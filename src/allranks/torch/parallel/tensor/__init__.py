"""Tensor parallelism: which layers are cut, what they compute, and what they exchange."""
