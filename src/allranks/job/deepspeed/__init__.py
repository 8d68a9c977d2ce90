"""DeepSpeed's configuration (a JSON file) as a job."""
