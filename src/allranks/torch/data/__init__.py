"""The data of a task: opened, cut for this rank, read, copied, evaluated."""
