"""Collectives between the ranks of one host through shared memory, not through sockets.

The library is in C (`native/`); this package allocates its memory and gives torch a process group.
Without the compiled library, or shared memory, ranks use Gloo, and the run says so.
"""
