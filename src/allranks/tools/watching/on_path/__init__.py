"""What stands on PYTHONPATH in a watched script, so that Python imports it first."""
