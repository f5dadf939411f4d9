"""Slurm's files, answers and commands: render, parse, ask.

The names below are loaded when first used: a command that only needs a host list pays for nothing else."""
