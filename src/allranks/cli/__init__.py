"""The command line: one file per verb. Each parses, calls one function, and prints."""
