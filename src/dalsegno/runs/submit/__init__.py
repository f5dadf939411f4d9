"""Submit runs: requests, job files, plans, Slurm commands, and the environment variables for frameworks."""
