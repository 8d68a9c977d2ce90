"""Where nodes come from: one file per place."""
