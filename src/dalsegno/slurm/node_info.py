"""A node as Slurm sees it."""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.slurm.states import NodeFlag, NodeState


@dataclass(frozen=True)
class NodeInfo:
    """A node as Slurm sees it. Times are seconds since 1970."""

    name: str
    state: NodeState
    flags: frozenset[NodeFlag] = frozenset()
    state_text: str = ""  # as Slurm wrote it
    reason: str = ""
    reason_user: str = ""
    reason_at: int | None = None
    partitions: tuple[str, ...] = ()
    gpus: int = 0
    gpus_used: int = 0
    gpu_type: str = ""
    cpus: int = 0
    cpus_used: int = 0
    memory_mib: int = 0
    memory_used_mib: int = 0
    address: str = ""
    hostname: str = ""
    port: int = 0
    features: tuple[str, ...] = ()
    weight: int = 1
    version: str = ""
    booted_at: int | None = None
    slurmd_started_at: int | None = None

    @property
    def drained(self) -> bool:
        """Out of service, and no job left on it."""
        return self.draining and self.state not in (NodeState.ALLOCATED, NodeState.MIXED) and not self.completing

    @property
    def draining(self) -> bool:
        """Taken out of service, with or without jobs still on it."""
        return NodeFlag.DRAIN in self.flags

    @property
    def completing(self) -> bool:
        return NodeFlag.COMPLETING in self.flags

    @property
    def down(self) -> bool:
        return self.state in (NodeState.DOWN, NodeState.ERROR)

    @property
    def responding(self) -> bool:
        return NodeFlag.NOT_RESPONDING not in self.flags

    @property
    def powered_down(self) -> bool:
        """Off until a job wants it."""
        return bool(self.flags & {NodeFlag.POWERED_DOWN, NodeFlag.POWERING_DOWN, NodeFlag.POWER_DOWN})

    @property
    def in_service(self) -> bool:
        """Slurm would start a job here, now or when the present ones end."""
        busy_or_free = self.state in (NodeState.IDLE, NodeState.MIXED, NodeState.ALLOCATED)
        return busy_or_free and self.responding and not self.flags & _OUT_OF_SERVICE


_OUT_OF_SERVICE = {
    NodeFlag.DRAIN,
    NodeFlag.FAIL,
    NodeFlag.INVALID_REG,
    NodeFlag.MAINTENANCE,
    NodeFlag.POWERED_DOWN,
    NodeFlag.POWERING_DOWN,
    NodeFlag.REBOOT_ISSUED,
}
