"""Snapshots in memory: a rank's state in named shared-memory files that outlive the worker and its agent.

Modules are imported on first use. Code that reads only names, records and the safe step does not import torch.
"""
