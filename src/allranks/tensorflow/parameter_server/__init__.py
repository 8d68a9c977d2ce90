"""One strategy of many processes: a chief hands steps to workers, servers hold the variables."""
