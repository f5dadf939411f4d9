"""Oracle Cloud Infrastructure with the HPC stack of Resource Manager."""
