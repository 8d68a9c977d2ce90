"""What the strategies share that lay layers of one model on different ranks."""
