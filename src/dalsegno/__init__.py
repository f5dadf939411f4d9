"""Dal Segno: one YAML file becomes a Slurm cluster that keeps training alive."""

__version__ = "0.1.0"
