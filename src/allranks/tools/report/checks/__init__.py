"""The page of checks: what was looked at, what was equal, and the first difference."""

RECORD = "check.json"
"""The file that `allranks check --keep-runs FOLDER` writes to that folder."""
