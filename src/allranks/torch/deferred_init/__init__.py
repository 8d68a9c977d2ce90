"""A model whose initialisation is recorded, and replayed one parameter at a time."""
