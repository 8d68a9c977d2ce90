"""`allranks run`: any script of any framework, its command line read and its ranks started."""
