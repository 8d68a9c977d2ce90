"""Optimizers for large batches that torch does not have: one file each. They count no steps but
their own and know nothing of ranks: what they see is the gradient of the whole global batch."""
