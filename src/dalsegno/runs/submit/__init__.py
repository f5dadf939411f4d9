"""Submission of runs: requests, job files, plans, Slurm commands, and the variables of frameworks."""
