"""Collectives between the ranks of one host, through memory that they share, not through sockets.

The library itself is C (`native/`); what is here gives it memory, and torch a process group. Where
it was not compiled, or memory cannot be shared, ranks talk over Gloo, and the run says so.
"""
