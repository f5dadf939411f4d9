"""Where a run's agents come from: Slurm jobs that are asked for, or nowhere, where agents come by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from typing import Any, Protocol

from dalsegno.runs.coordinator.events import Event
from dalsegno.runs.coordinator.saved_state import SavedJob
from dalsegno.runs.coordinator.site import ASK_SLURM_S
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.status import RunCause


class Boss(Protocol):
    """The coordinator, as its staff department sees it."""

    def apply(self, event: Event) -> None: ...

    def keep(self) -> None:
        """Write down what is so now."""
        ...

    def note(self, text: str) -> None: ...

    def journal(self, event: RunEvent, **what: object) -> None: ...

    def stop(self, code: int, why: str, about: RunCause = RunCause.OTHER) -> None:
        """End the run for good, whatever state it is in."""
        ...

    def rest(self, why: str) -> None:
        """End, but not the run: another coordinator goes on with it later."""
        ...

    def soon(self, work: Awaitable[None]) -> None:
        """Begin something that is not waited for; its failure is ours."""
        ...

    @property
    def closing(self) -> bool:
        """No more agents are wanted: the run has ended, or leaves its nodes."""
        ...

    @property
    def ending(self) -> bool:
        """It will not go on, on these nodes or others."""
        ...

    @property
    def present(self) -> frozenset[str]:
        """Nodes whose agents are connected."""
        ...

    @property
    def ready(self) -> frozenset[str]:
        """Those of them that take part, or could at once."""
        ...

    def go_on_without(self, node: str, why: str) -> None:
        """Go on without this node, which is alive."""
        ...

    @property
    def wanted(self) -> int:
        """How many nodes the run has at its best."""
        ...

    @property
    def generation(self) -> int: ...


class Staff(Protocol):
    """Brings agents. Every method may be called at any time, in any state."""

    excluded: list[str]  # nodes not to take (again)
    silent: dict[str, float]  # nodes taken to be dead, and since when
    unhealthy: frozenset[str]  # nodes that Slurm has taken out of service

    def begin(self) -> None: ...

    async def adopt(self, saved: tuple[SavedJob, ...]) -> bool:
        """Go on with a former self's jobs; False if none of them is ours any more."""
        ...

    def saved(self) -> tuple[SavedJob, ...]: ...

    def look_after(self) -> None:
        """Called twice a second, and when something has changed."""
        ...

    async def ask_slurm(self) -> None:
        """Called every few seconds: find out what Slurm did without telling."""
        ...

    @property
    def ask_again_s(self) -> float:
        """In how many seconds."""
        ...

    def leave_to_be_mended(self, node: str) -> None:
        """Slurm has it out of service, and it is no use to the run: not taken again before it is in service again."""
        ...

    def agent_came(self, node: str, again: bool) -> bool:
        """Whether it may take part. Again: it has served before, and was given up since."""
        ...

    def agent_ready(self, node: str) -> None: ...

    def agent_lost(self, node: str, silent: bool) -> None: ...

    def leaving(self, job: int, node: str = "") -> None:
        """The nodes of this job are needed back (0: of the run's own), as an agent on this node was told: see to others
        in time."""
        ...

    async def move(self) -> None:
        """Nothing runs any more: give the nodes back."""
        ...

    async def call_back(self, nodes: Collection[str]) -> set[str]:
        """At the end, an agent on each of these that has none and lives: it leaves nothing there. Says who comes."""
        ...

    async def dismiss(self, code: int | None = None) -> None:
        """The run is over: nothing of ours may stay in Slurm. It is told this exit code, or None: cancelled."""
        ...

    @property
    def jobs(self) -> tuple[int, ...]: ...

    @property
    def has_nodes(self) -> bool: ...

    @property
    def waits(self) -> bool:
        """Slurm has been asked for more nodes, and has not given them yet."""
        ...

    @property
    def coming(self) -> frozenset[str]:
        """Nodes whose agents are here, ready or not, or on their way."""
        ...

    @property
    def refused(self) -> str:
        """Why Slurm gives no further node; "" if it was not asked, or gives one."""
        ...


class NoStaff:
    """Agents come by themselves: somebody else starts them (torchrun's way)."""

    def __init__(self) -> None:
        self.excluded: list[str] = []
        self.silent: dict[str, float] = {}
        self.unhealthy: frozenset[str] = frozenset()

    def begin(self) -> None: ...

    async def adopt(self, saved: tuple[SavedJob, ...]) -> bool:
        return True

    def saved(self) -> tuple[SavedJob, ...]:
        return ()

    def look_after(self) -> None: ...

    async def ask_slurm(self) -> None: ...

    @property
    def ask_again_s(self) -> float:
        return ASK_SLURM_S

    def leave_to_be_mended(self, node: str) -> None:
        self.excluded.append(node)

    def agent_came(self, node: str, again: bool) -> bool:
        return True

    def agent_ready(self, node: str) -> None: ...

    def agent_lost(self, node: str, silent: bool) -> None: ...

    def leaving(self, job: int, node: str = "") -> None: ...

    async def move(self) -> None: ...

    async def call_back(self, nodes: Collection[str]) -> set[str]:
        return set()

    async def dismiss(self, code: int | None = None) -> None: ...

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


# ---- Things that are begun and not waited for. One that fails is not forgotten: it ends whoever lives by them.


class BackgroundTasks:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[None]] = set()
        self._failures: list[BaseException] = []
        self._failed = asyncio.Event()

    def soon(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failures.append(error)
            self._failed.set()

    async def until(self, over: asyncio.Event, *loops: Awaitable[None]) -> None:
        """Live until it is over. What fails meanwhile is our own failure: better to crash, and be started again, than
        to go on half blind."""
        work = (over.wait(), self._failure(), *loops)
        every: set[asyncio.Future[Any]] = {asyncio.ensure_future(each) for each in work}
        done, others = await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        for task in done:
            task.result()

    async def _failure(self) -> None:
        """Raises the first one, once there is one."""
        await self._failed.wait()
        raise self._failures[0]
