"""Before the ranks start: what the task says of itself, and the strategy where the dial chooses."""
