"""What a rank writes down: its events, its metrics and logs, the files at the end, its failure."""
