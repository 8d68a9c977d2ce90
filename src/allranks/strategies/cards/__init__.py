"""The cards of strategies, family by family: `torch_cards` has all of them."""
