"""Sums of gradients that are sent in fewer bytes, with error feedback."""
