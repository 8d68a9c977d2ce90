"""Context parallelism: every rank of the axis has some positions of each sequence."""
