"""What stands for a tensor where few bytes may be sent, and what is kept of the rest."""
