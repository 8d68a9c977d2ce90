"""What `check` concludes from the records of a script: one rule for each kind of mistake."""
