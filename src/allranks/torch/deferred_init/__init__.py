"""Initial weights of large models: whole on one rank of a node at a time, or on meta."""
