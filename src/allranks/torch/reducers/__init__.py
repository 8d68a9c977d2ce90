"""How gradients are summed across ranks: one file each, used bucket by bucket."""
