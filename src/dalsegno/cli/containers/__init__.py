"""Commands for container images and for `srun --container-image`."""
