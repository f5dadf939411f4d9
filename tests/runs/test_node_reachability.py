"""Reachability of nodes."""

import asyncio

from dalsegno.runs.coordinator.agents.liveness import unreachable
from dalsegno.slurm.facts import NodeInfo, NodeState

NOWHERE = "224.0.0.1"  # a multicast address, to which there is no TCP route


async def no_port() -> int:
    raise AssertionError("slurmd is not to be disturbed")


def asked(*nodes: NodeInfo, port: int | None = None) -> list[str]:
    async def usual() -> int:
        return port or 0

    return asyncio.run(unreachable(nodes, no_port if port is None else usual))


def node(name: str, address: str, port: int = 0) -> NodeInfo:
    return NodeInfo(name, NodeState.IDLE, address=address, port=port)


def test_refusing_kernel_is_reachable_without_contacting_slurmd():
    assert asked(node("n1", "127.0.0.1"), node("n2", "localhost")) == []


def test_silent_host_is_unreachable():
    assert asked(node("n1", "127.0.0.1"), node("n2", NOWHERE), port=6818) == ["n2"]


def test_node_without_an_address_is_not_reported():
    assert asked(node("n1", ""), node("n2", "no.such.host.invalid")) == []
    assert asked(node("n1", NOWHERE), port=0) == []  # the port of slurmd is unknown
