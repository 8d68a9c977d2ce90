"""Strategies of one process with several devices."""
