"""What recovery needs of the world, each as a Protocol. The real ones are Slurm's client, the link to the node agents
and a target; fakes of all three are in `fakes`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from dalsegno.recovery.agent_view import AgentView
from dalsegno.recovery.facts import Validation
from dalsegno.slurm.facts import JobInfo, NodeInfo
from dalsegno.slurm.parse.jobs import Queue


class Slurm(Protocol):
    """What `SlurmClient` does of it."""

    def nodes(self, names: str | Iterable[str] = ()) -> list[NodeInfo]: ...

    def queue(self, *, ended: bool = False) -> Queue: ...

    def jobs(self, *, ended: bool = False) -> list[JobInfo]: ...

    def drain(self, nodes: str | Iterable[str], reason: str) -> None: ...

    def set_down(self, nodes: str | Iterable[str], reason: str) -> None: ...

    def resume(self, nodes: str | Iterable[str]) -> None: ...

    def requeue(self, *jobs: int | str) -> None: ...

    def update(self, **settings: str) -> None: ...

    def scontrol(self, *words: str) -> str: ...


class Agents(Protocol):
    """The node agents, as their link knows them. None of these waits for long."""

    def remember(self, nodes: Iterable[str]) -> None:
        """Nodes that were in service when the controller before this one ended: they are missed sooner."""
        ...

    def views(self) -> Mapping[str, AgentView]: ...

    def validations(self) -> Mapping[str, Validation]:
        """The last answer of each node to `validate`."""
        ...

    def validating(self) -> Mapping[str, str]:
        """Nodes that are at it, and which order each carries out."""
        ...

    def validate(self, node: str, ask: str, partner: str) -> None:
        """Tell a node to prove itself; its answer carries `ask`. Told again with the same, it does not start anew."""
        ...

    def rest(self, node: str, seconds: float) -> None:
        """Have an agent let go of its GPUs for so long: they cannot be reset while it holds them. 0: no longer."""
        ...

    def evidence(self, node: str) -> Mapping[str, str]:
        """What a node can tell of its last hours, as files; of one that cannot speak any more, only why. This one may
        wait."""
        ...
