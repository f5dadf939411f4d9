"""Fixtures of the cluster tests, for attacks on real clusters."""

from tests.cluster.conftest import cache as cache
from tests.cluster.conftest import shared as shared
