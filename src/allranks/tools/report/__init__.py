"""`allranks report`: what runs have recorded, as one page and as a trace."""
