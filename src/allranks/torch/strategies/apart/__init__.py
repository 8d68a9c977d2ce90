"""Strategies whose ranks train apart: for ever, or between two meetings."""
