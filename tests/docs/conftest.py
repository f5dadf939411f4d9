"""Fixtures: pages that create clusters use the same kind of home as the cluster tests."""

from tests.cluster.conftest import cache, cli

__all__ = ["cache", "cli"]
