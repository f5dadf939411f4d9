"""`srun --auto-resume=1`: a step that a node failure has ended is started again on healthy nodes."""
