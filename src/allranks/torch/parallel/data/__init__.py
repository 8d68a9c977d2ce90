"""Data parallelism: every rank holds the whole model; gradients are summed in buckets."""
