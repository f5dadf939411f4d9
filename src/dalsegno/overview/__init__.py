"""The state of a whole cluster: gathered from Slurm, the controller and the runs, and summed up in a verdict."""
