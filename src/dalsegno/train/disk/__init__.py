"""Checkpoints on disk. Modules load on first use, so that listing and verifying do not import torch."""
