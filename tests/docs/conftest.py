"""Pages that make clusters get the same kind of home as the tests on the real cluster."""

from tests.cluster.conftest import cache, cli

__all__ = ["cache", "cli"]
