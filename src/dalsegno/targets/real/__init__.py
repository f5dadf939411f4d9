"""Nodes of a Slurm that is not ours: what an ordinary user may do there, in her own jobs."""

from dalsegno.targets.real.breaking import RealNodes, enter_with_srun

__all__ = ["RealNodes", "enter_with_srun"]
