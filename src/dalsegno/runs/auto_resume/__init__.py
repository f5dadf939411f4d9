"""Implement `srun --auto-resume=1`, which restarts a step on healthy nodes after a node failure has ended it."""
