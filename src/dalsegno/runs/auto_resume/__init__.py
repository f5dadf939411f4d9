"""`srun --auto-resume=1`: restarts a step on healthy nodes after a node failure has ended it."""
