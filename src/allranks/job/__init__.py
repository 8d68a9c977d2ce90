"""The request: what a job is, what it may hold, how it is read, written and resumed."""
