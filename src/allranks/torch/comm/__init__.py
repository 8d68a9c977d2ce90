"""Communication between the ranks of a job: the group, what it counts, and how ranks meet."""
