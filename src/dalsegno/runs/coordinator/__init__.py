"""The coordinator of a run. It manages agents, generations, recovery from lost nodes, and the run's Slurm jobs."""
