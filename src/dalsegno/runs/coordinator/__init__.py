"""The coordinator of a run: agents, generations, recovery from lost nodes, and the Slurm jobs behind them."""
