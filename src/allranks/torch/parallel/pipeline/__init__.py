"""Pipeline and model parallelism: the layers of one model on different ranks."""
