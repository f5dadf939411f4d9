"""Snapshots in memory: a rank's state in named shared-memory files that outlive the worker and its agent.

Nothing is loaded before it is asked for: names, records and the safe step cost no torch.
"""
