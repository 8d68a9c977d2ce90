"""The processes of one machine: forked, signalled, and nothing left of them."""
