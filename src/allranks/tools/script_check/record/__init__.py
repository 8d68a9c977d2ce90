"""Runs inside the ranks of a script under `check`, and writes down what they do.

It runs in a foreign process, so it imports the standard library only and receives torch as an
argument: `import allranks.torch` would cost the script seconds, and load modules it did not import.
"""
