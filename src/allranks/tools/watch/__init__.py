"""What the facts of all ranks of a watched script prove: one pure function per fault."""
