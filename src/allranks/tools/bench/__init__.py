"""`allranks bench`: how fast a program is, by strategy and number of ranks."""
