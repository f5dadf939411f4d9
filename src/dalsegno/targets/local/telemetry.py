"""A healthy node's hardware, as its telemetry file tells it. Pure."""

from __future__ import annotations

from dalsegno.health.telemetry import Telemetry, healthy
from dalsegno.spec.facts import Node

SIMULATED_MEMORY_MIB = 16384  # of a GPU whose type the file does not tell


def healthy_node(node: Node, simulated: bool, machine: str = "") -> Telemetry:
    """Another `machine` of the same name has other GPUs. Real GPUs speak for themselves: none are told of here."""
    return healthy(
        node.name,
        node.gpus if simulated else 0,
        node.gpu_type,
        memory_mib=node.gpu_memory_mib or SIMULATED_MEMORY_MIB,
        stamp=gpu_stamp(node, simulated),
        machine=machine,
    )


def gpu_stamp(node: Node, simulated: bool) -> str:
    """Which GPUs the telemetry is of; ends in a full stop, so that no stamp is the beginning of another."""
    return f"made for {node.gpus if simulated else 0} x {node.gpu_type or 'gpu'} with {node.gpu_memory_mib} MiB."
