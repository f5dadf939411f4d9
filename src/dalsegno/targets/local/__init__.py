"""A cluster on this machine: real Slurm on virtual hosts (needs root) or on loopback ports."""

from dalsegno.targets.local.target import LocalTarget

__all__ = ["LocalTarget"]
