"""Tools to break a training on purpose, for our tests and for those of our users."""
