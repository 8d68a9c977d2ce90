"""The model of a task: its layers, its precision, its digest, where it is."""
