"""Random numbers of a forward pass: they belong to a sample, whichever rank computes it."""
