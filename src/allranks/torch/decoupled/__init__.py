"""Learners that come and go, and the synchronizer that merges what they have found."""
