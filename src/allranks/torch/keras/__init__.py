"""Keras models as guests of the torch engine."""
