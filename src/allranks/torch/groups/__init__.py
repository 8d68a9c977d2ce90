"""Process groups of torch: those that count what is sent, and those that are lent."""
