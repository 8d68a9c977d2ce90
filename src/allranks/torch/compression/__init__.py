"""Codecs for flat tensors, and error feedback."""
