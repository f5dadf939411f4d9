"""The cluster file: its model, loading with line numbers, resolving into facts.

Names are loaded when first used, so that `from dalsegno.spec.facts import Cluster` costs no pydantic."""
