"""Snapshots in memory: a rank's state in named shared-memory files that outlive the worker and its agent.

Modules load on first use, so that names, records and the safe step do not import torch.
"""
