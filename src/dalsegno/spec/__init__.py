"""The cluster file: its model, loading it with line numbers, and resolving it into facts.

Nothing is imported here, so that `from dalsegno.spec.facts import Cluster` does not import pydantic.
"""
