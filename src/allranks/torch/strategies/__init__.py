"""How one optimizer step on one global batch is carried out by all ranks: one file each."""
