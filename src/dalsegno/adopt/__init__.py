"""Describe a Slurm cluster that Dal Segno did not create. Nothing here changes the cluster."""
