"""Runs inside the ranks of a script under `check`, and writes down what they do."""
