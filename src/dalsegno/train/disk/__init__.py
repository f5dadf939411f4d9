"""Checkpoints on disk. Modules are imported on first use, so that listing and verifying do not import torch."""
