"""Tests of which nodes a run uses again, based on what Slurm reports over time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from dalsegno.runs.comment import JobRole
from dalsegno.runs.coordinator.generations.events import Event
from dalsegno.runs.coordinator.generations.generations import Run
from dalsegno.runs.coordinator.generations.group import Shape
from dalsegno.runs.coordinator.nodes.allocation_actions import AgentStep, Job
from dalsegno.runs.coordinator.nodes.node_rules import LONG_S
from dalsegno.runs.coordinator.nodes.node_source import RunControl
from dalsegno.runs.coordinator.nodes.slurm_jobs import JobProcesses, StepProcess
from dalsegno.runs.coordinator.nodes.slurm_node_source import SlurmNodeSource
from dalsegno.runs.coordinator.site import ASK_SLURM_S
from dalsegno.runs.folder import RunFolder
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import NodeFlag, NodeInfo, NodeState
from dalsegno.system.children import Child
from tests.runs.small_site import SmallSite

IDLE = NodeInfo("n1", NodeState.IDLE, slurmd_started_at=10)
DOWN = replace(IDLE, state=NodeState.DOWN, reason="dalsegno:replace:gone neither answers")
DRAINED = replace(IDLE, flags=frozenset({NodeFlag.DRAIN}), reason="dalsegno:reboot:xid[79] off the bus")


@dataclass
class PlayedSlurm:
    """A Slurm with one node."""

    node: NodeInfo = IDLE

    def nodes(self, names: Iterable[str] = ()) -> list[NodeInfo]:
        return [self.node] if self.node.name in names else []


@dataclass(frozen=True)
class PlayedSite(SmallSite):
    played: PlayedSlurm = field(default_factory=PlayedSlurm)

    @property
    def slurm(self) -> SlurmClient:
        return cast(SlurmClient, self.played)


@dataclass
class FakeCoordinator:
    """The coordinator of a run that continues and has no agents."""

    closing: bool = False
    ending: bool = False
    run: Run = field(default_factory=lambda: Run(Shape(1, 1, 1), generation=1))
    present: frozenset[str] = frozenset()
    begun: list[Awaitable[None]] = field(default_factory=list)
    heard: list[Event] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)

    def apply(self, event: Event) -> None:
        self.heard.append(event)

    def save_state(self) -> None: ...

    def note(self, text: str) -> None:
        self.noted.append(text)

    def journal(self, event: str, **what: object) -> None: ...

    def run_in_background(self, work: Awaitable[None]) -> None:
        self.begun.append(work)


Staffed = tuple[SlurmNodeSource, PlayedSlurm, FakeCoordinator]


def looks(staff: SlurmNodeSource, slurm: PlayedSlurm, coordinator: FakeCoordinator, *states: NodeInfo) -> bool:
    """Let Slurm report these states in turn; return whether the node is used again."""

    async def all_of_them() -> None:
        for state in states:
            slurm.node = state
            await staff.ask_slurm()
        while coordinator.begun:
            await coordinator.begun.pop()

    asyncio.run(all_of_them())
    return "n1" not in staff.lost_since


@pytest.fixture
def staffed(tmp_path: Path) -> Staffed:
    coordinator, slurm = FakeCoordinator(), PlayedSlurm()
    site = PlayedSite(RunFolder(tmp_path / "train-x"), played=slurm)
    return SlurmNodeSource(site, cast(RunControl, coordinator)), slurm, coordinator


def test_node_that_was_down_is_used_again_without_a_reboot(
    staffed: Staffed,
):
    staff, slurm, coordinator = staffed
    staff.agent_lost("n1", silent=True)
    assert not looks(staff, slurm, coordinator, IDLE, IDLE), "Slurm has not noticed the loss yet"
    assert not looks(staff, slurm, coordinator, DOWN) and staff.ask_again_s < ASK_SLURM_S
    assert looks(staff, slurm, coordinator, IDLE)
    assert staff.ask_again_s == ASK_SLURM_S


def test_node_that_was_out_of_service_is_used_again_after_repair(
    staffed: Staffed,
):
    staff, slurm, coordinator = staffed
    staff.leave_for_repair("n1")
    assert not looks(staff, slurm, coordinator, DRAINED, DOWN)
    assert looks(staff, slurm, coordinator, IDLE) and staff.excluded == []


def test_returning_agent_is_refused_if_slurm_marked_its_node_down(
    staffed: Staffed,
):
    """The controller repairs that node next, even if a job runs on it."""
    staff, slurm, coordinator = staffed
    staff.agent_lost("n1", silent=True)
    assert not looks(staff, slurm, coordinator, DOWN)
    assert not staff.agent_connected("n1", again=True) and "n1" in staff.lost_since
    assert staff.agent_connected("n1", again=False), "a new agent was started there since, so Slurm has it back"
    assert looks(staff, slurm, coordinator, IDLE) and staff.agent_connected("n1", again=True)


# Probes


@dataclass
class PlayedChild:
    """An srun that is alive."""

    def alive(self) -> bool:
        return True


def probed(staff: SlurmNodeSource, coordinator: FakeCoordinator) -> AgentStep:
    """Let the run probe a node whose agent is overdue."""
    step = AgentStep(1, ("n1",), began=time.monotonic() - 3 * LONG_S)
    staff.allocation.jobs.append(Job(JobRole.MAIN, 1, 7, ("n1",), steps=[step]))
    processes = {1: StepProcess(cast(Child, PlayedChild()), ("n1",))}
    staff._jobs._jobs[1] = JobProcesses(1, 7, steps=processes, granted=True)

    async def look() -> None:
        staff.check_agents()
        while coordinator.begun:
            await coordinator.begun.pop()

    asyncio.run(look())
    return step


def test_slow_agent_is_not_started_twice(staffed: Staffed):
    """An agent is slow, for example, while a large image is imported. The fake site raises on a second step."""
    staff, _, coordinator = staffed
    step = probed(staff, coordinator)
    assert staff.lost_since == {} and step.will_bring("n1", time.monotonic())
    (said,) = coordinator.noted
    assert said == f"agents are slow to start on n1 (image import or prolog); see {staff.site.folder.agents_log}"


@pytest.mark.parametrize("why", ["its task has ended", "its slurmd was started since"])
def test_agent_that_will_not_come_is_started_again(staffed: Staffed, why: str):
    staff, slurm, coordinator = staffed
    if why == "its task has ended":
        staff.site.folder.root.mkdir()
        staff.site.folder.agents_log.write_text("srun: error: n1: task 0: Killed\n")
    else:
        slurm.node = replace(IDLE, slurmd_started_at=int(time.time()))
    with pytest.raises(AssertionError, match="nothing is asked of Slurm"):
        probed(staff, coordinator)


# Requests


def test_request_that_was_released_before_it_was_made_is_not_made(staffed: Staffed):
    """The run may end while earlier jobs are being released. The fake site raises on a request."""
    staff, _, coordinator = staffed
    asked = staff.allocation.begin()
    staff._execute(staff.allocation.release_all())
    staff._execute(asked)
    assert staff.jobs == () and not staff.waits
    for work in coordinator.begun:
        work.close()  # type: ignore[attr-defined]
