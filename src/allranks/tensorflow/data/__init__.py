"""The data of a Keras task: opened, cut for this rank, read, evaluated."""
