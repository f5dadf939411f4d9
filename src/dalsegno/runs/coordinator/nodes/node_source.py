"""The interfaces of a node source and its coordinator, and the source for runs whose agents are started elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Protocol

from dalsegno.runs.coordinator.generations.events import Event
from dalsegno.runs.coordinator.generations.generations import Run
from dalsegno.runs.coordinator.saved_state import SavedJob
from dalsegno.runs.coordinator.site import ASK_SLURM_S
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.status import RunCause
from dalsegno.wire.cloud_notice import CloudNotice
from dalsegno.wire.frames import Message


class RunControl(Protocol):
    """The coordinator's interface for its components: node source, hang detection and admission of nodes."""

    @property
    def run(self) -> Run: ...

    @property
    def folder(self) -> RunFolder: ...

    def apply(self, event: Event) -> None: ...

    def send(self, agent: str, message: Message) -> None: ...

    def last_output(self, generation: int) -> float:
        """Return the monotonic time at which any rank last wrote output."""
        ...

    def save_state(self) -> None:
        """Save the current state for the next coordinator."""
        ...

    def note(self, text: str) -> None: ...

    def journal(self, event: RunEvent, **what: object) -> None: ...

    def stop(self, code: int, why: str, about: RunCause = RunCause.OTHER) -> None:
        """End the run for good, whatever state it is in."""
        ...

    def suspend(self, why: str) -> None:
        """End the coordinator but not the run: another coordinator continues it later."""
        ...

    def run_in_background(self, work: Awaitable[None]) -> None:
        """Start background work; if it fails, the coordinator fails."""
        ...

    @property
    def closing(self) -> bool:
        """Whether no more agents are needed, because the run is ending or leaving its nodes."""
        ...

    @property
    def ending(self) -> bool:
        """Whether the run is ending and will not continue on other nodes."""
        ...

    @property
    def present(self) -> frozenset[str]:
        """The nodes whose agents are connected."""
        ...

    def continue_without(self, node: str, why: str) -> None:
        """Continue without this node, although it is alive."""
        ...


class NodeSource(Protocol):
    """Obtains nodes, starts agents on them and releases them. Each method may be called at any time, in any state."""

    @property
    def excluded(self) -> Collection[str]:
        """The nodes that the run must not use."""
        ...

    @property
    def lost_since(self) -> Mapping[str, float]:
        """The nodes that are lost or left for repair, with the time of the loss."""
        ...

    @property
    def unhealthy(self) -> frozenset[str]:
        """The nodes that are out of service in Slurm."""
        ...

    def begin(self) -> None: ...

    async def adopt(
        self, saved: Sequence[SavedJob], excluded: Collection[str], lost_since: Mapping[str, float]
    ) -> bool:
        """Continue with the previous coordinator's jobs and nodes; return False if these jobs have ended."""
        ...

    def saved(self) -> tuple[SavedJob, ...]: ...

    def check_agents(self) -> None:
        """Start missing agents. Call this twice a second and after changes."""
        ...

    async def ask_slurm(self) -> None:
        """Query Slurm for changes to jobs and nodes. Call this every few seconds."""
        ...

    @property
    def ask_again_s(self) -> float:
        """The number of seconds until the next `ask_slurm`."""
        ...

    def exclude(self, node: str) -> None:
        """Do not use this node again."""
        ...

    def leave_for_repair(self, node: str) -> None:
        """Leave a node that is out of service in Slurm. The run may use it again when it is back in service."""
        ...

    def notice_read(self, node: str, notice: CloudNotice) -> None:
        """Prepare to leave a node, because its agent has read that the cloud will reclaim it."""
        ...

    def agent_connected(self, node: str, again: bool) -> bool:
        """Return whether the agent may join the run. `again` means that the agent was a member before it was lost."""
        ...

    def agent_ready(self, node: str) -> None: ...

    def agent_lost(self, node: str, silent: bool) -> None: ...

    def leaving(self, job: int, node: str = "") -> None:
        """Prepare to leave the nodes of a job (0 for the run's own job).

        `node` is where the agent received Slurm's signal.
        """
        ...

    async def move(self) -> None:
        """Release the nodes, which have no workers any more."""
        ...

    async def recall_agents(self, nodes: Collection[str]) -> set[str]:
        """Start agents on live nodes that have none, to clean up at the end of the run.

        Return the nodes whose agents are expected to connect.
        """
        ...

    async def release_all(self, code: int | None = None) -> None:
        """Remove all of the run's jobs from Slurm. They end with this exit code; None cancels them."""
        ...

    @property
    def jobs(self) -> tuple[int, ...]: ...

    @property
    def has_nodes(self) -> bool: ...

    @property
    def waits(self) -> bool:
        """Whether a job has been requested but not granted yet."""
        ...

    @property
    def coming(self) -> frozenset[str]:
        """The nodes whose agents are starting or connected, except nodes that the run is leaving."""
        ...

    @property
    def refused(self) -> str:
        """The reason why Slurm refused another node; "" if the last request was not refused."""
        ...


class NoNodeSource:
    """The node source for runs whose agents are started by something else, such as torchrun."""

    def __init__(self) -> None:
        self.excluded: list[str] = []
        self.lost_since: dict[str, float] = {}
        self.unhealthy: frozenset[str] = frozenset()

    def begin(self) -> None: ...

    async def adopt(
        self, saved: Sequence[SavedJob], excluded: Collection[str], lost_since: Mapping[str, float]
    ) -> bool:
        self.excluded, self.lost_since = list(excluded), dict(lost_since)
        return True

    def saved(self) -> tuple[SavedJob, ...]:
        return ()

    def check_agents(self) -> None: ...

    async def ask_slurm(self) -> None: ...

    @property
    def ask_again_s(self) -> float:
        return ASK_SLURM_S

    def exclude(self, node: str) -> None:
        self.excluded.append(node)

    def leave_for_repair(self, node: str) -> None:
        self.exclude(node)

    def notice_read(self, node: str, notice: CloudNotice) -> None: ...

    def agent_connected(self, node: str, again: bool) -> bool:
        return True

    def agent_ready(self, node: str) -> None: ...

    def agent_lost(self, node: str, silent: bool) -> None: ...

    def leaving(self, job: int, node: str = "") -> None: ...

    async def move(self) -> None: ...

    async def recall_agents(self, nodes: Collection[str]) -> set[str]:
        return set()

    async def release_all(self, code: int | None = None) -> None: ...

    @property
    def jobs(self) -> tuple[int, ...]:
        return ()

    @property
    def has_nodes(self) -> bool:
        return True

    @property
    def waits(self) -> bool:
        return False

    @property
    def coming(self) -> frozenset[str]:
        return frozenset()

    @property
    def refused(self) -> str:
        return ""
