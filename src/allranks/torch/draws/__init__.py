"""What a forward pass draws: random numbers that belong to a sample, whoever computes it."""
