"""A run as a user asks for it, and what it asks of Slurm: requests, job files, plans, steps, frameworks.

The names below are loaded when first used: a command that only reads a torchrun line pays for nothing else."""
