"""Computing sites with Slurm: what they have, and what a job asks of them. Nothing here acts."""
