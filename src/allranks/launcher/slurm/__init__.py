"""All of Slurm: what a site has, what a job asks of it, and the commands that say so."""
