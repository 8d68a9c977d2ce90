"""The first weights of models that are large: whole on one rank of a node at a time, or on meta."""
