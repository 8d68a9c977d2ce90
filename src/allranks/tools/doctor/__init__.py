"""Would a run work here? Probes of machines, links and folders, and what is found."""
