"""Render Slurm's files, run its commands and parse their output.

Nothing is imported here, so that a command imports only the modules that it uses.
"""
