"""Several machines: the agent on each, the channel to it, and how they join a job."""
