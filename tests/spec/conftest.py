"""Fixtures for cluster files."""

from collections.abc import Callable
from textwrap import dedent

import pytest

from dalsegno.errors import SpecError
from dalsegno.spec.facts import Cluster
from dalsegno.spec.load import parse_spec
from dalsegno.spec.resolve import resolve

Faults = Callable[[str], list[tuple[int, str, str]]]


@pytest.fixture
def faults() -> Faults:
    """Return a function that gives all problems of a cluster file as (line, what, hint); [] for a valid one."""

    def read(text: str) -> list[tuple[int, str, str]]:
        try:
            resolve(parse_spec(dedent(text).lstrip("\n"), "c.yaml"))
        except SpecError as error:
            return [(int(each.where.removeprefix("c.yaml:")), each.what, each.hint) for each in error.problems]
        return []

    return read


@pytest.fixture
def cluster() -> Callable[[str], Cluster]:
    """Return a function that resolves a valid cluster file."""
    return lambda text: resolve(parse_spec(dedent(text)))
