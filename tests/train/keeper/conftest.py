"""Nodes with a keeper each, on loopback, removed after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.train.keeper.nodes import Node
from tests.train.memory.conftest import shm  # noqa: F401

NewNode = Callable[[str], Node]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, because the keepers use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def node(shm: Path) -> Iterator[NewNode]:  # noqa: F811
    nodes: list[Node] = []

    def make(name: str) -> Node:
        (shm / name).mkdir(mode=0o700)
        nodes.append(Node(shm / name))
        nodes[-1].start()
        return nodes[-1]

    yield make
    for one in nodes:
        one.close()
