"""`--strategy auto`: which way of sending less pays on a link, from arithmetic alone."""
