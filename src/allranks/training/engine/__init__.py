"""What the trainer of an engine has, and the pieces of it that are the same in all of them."""
