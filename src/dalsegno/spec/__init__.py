"""The cluster file: its model, loading with line numbers, resolving into facts.

Nothing is imported here, so that `from dalsegno.spec.facts import Cluster` does not import pydantic.
"""
