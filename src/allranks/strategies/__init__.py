"""What a strategy promises: cards, choices, roles, shards, the reduction tree. No framework."""
