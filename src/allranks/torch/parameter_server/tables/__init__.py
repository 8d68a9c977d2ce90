"""Embedding tables on parameter servers only: their rows, row updates, and pulls of workers."""
