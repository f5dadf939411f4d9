"""SageMaker HyperPod with Slurm."""
