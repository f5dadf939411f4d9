"""Render Slurm's files, run its commands and parse their output.

Nothing is imported here, so that a command pays only for the modules it uses.
"""
