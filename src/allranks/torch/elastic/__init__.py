"""Learners that come and go: each trains alone and sends what it learned to a server."""
