"""The page of checks: what was looked at, what was equal, and the first difference."""

RECORD = "check.json"
"""What `allranks check --keep-runs FOLDER` leaves in that folder."""
