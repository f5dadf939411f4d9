"""Drills: random faults on a training run, and a report of what each one cost."""
