"""The run itself says so when its result follows the number of ranks."""
