"""What the loops in C of several rooms share."""
