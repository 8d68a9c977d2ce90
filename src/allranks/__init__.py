"""allranks: one training program on any number of ranks, and proof that the result is the same.

Importing this package does nothing: it reads no environment, sets up no logging and loads no
framework. Tasks for torch start from `allranks.on_torch`.
"""

__version__ = "0.1.0"
