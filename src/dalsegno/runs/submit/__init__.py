"""Submission of runs: requests, job files, plans, steps, frameworks."""
