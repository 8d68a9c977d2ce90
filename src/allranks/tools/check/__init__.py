"""Is the result the same? A job beside one process, compared step by step. Knows no framework."""
