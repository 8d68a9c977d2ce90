"""Keras models in the torch engine."""
