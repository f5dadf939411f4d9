"""Which nodes a run uses again, from what Slurm reports of them over time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from dalsegno.containers.native import NO_CONTAINER
from dalsegno.runs.comment import JobRole
from dalsegno.runs.coordinator.allocation import SlurmNodeSource
from dalsegno.runs.coordinator.events import Event, Leaving
from dalsegno.runs.coordinator.generations import Run
from dalsegno.runs.coordinator.group import Shape
from dalsegno.runs.coordinator.node_loss import LONG_S, MOST_TRIES
from dalsegno.runs.coordinator.node_source import RunControl
from dalsegno.runs.coordinator.site import ASK_SLURM_S
from dalsegno.runs.coordinator.slurm_jobs import AgentStep, Job
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
    ends: list[tuple[int, str]] = field(default_factory=list)

    def apply(self, event: Event) -> None:
        self.heard.append(event)

    def save_state(self) -> None: ...

    def note(self, text: str) -> None:
        self.noted.append(text)

    def stop(self, code: int, why: str) -> None:
        self.ends.append((code, why))
        self.closing = True

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
    return "n1" not in staff.silent


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


def test_replacement_request_is_cancelled_when_the_node_recovers(
    staffed: Staffed,
):
    staff, slurm, coordinator = staffed
    coordinator.present = frozenset({"n1"})
    instead = Job(JobRole.JOIN, 2)
    staff._jobs.jobs += [Job(JobRole.MAIN, 1, nodes=("n1",)), instead]
    looks(staff, slurm, coordinator, IDLE, DRAINED, DRAINED)
    assert not instead.given_back, "the node is under repair, and a replacement is needed"
    assert looks(staff, slurm, coordinator, IDLE) and instead.given_back and instead not in staff._jobs.jobs


def test_returning_agent_is_refused_if_slurm_marked_its_node_down(
    staffed: Staffed,
):
    """The controller repairs that node next, whoever runs on it."""
    staff, slurm, coordinator = staffed
    staff.agent_lost("n1", silent=True)
    assert not looks(staff, slurm, coordinator, DOWN)
    assert not staff.agent_came("n1", again=True) and "n1" in staff.silent
    assert staff.agent_came("n1", again=False), "a new agent was started there since, so Slurm has it back"
    assert looks(staff, slurm, coordinator, IDLE) and staff.agent_came("n1", again=True)


def test_run_leaves_its_nodes_only_for_its_own_job(staffed: Staffed):
    """Slurm ends a cut-off agent when its node returns, which tells nothing about the others."""
    staff, slurm, coordinator = staffed
    staff._jobs.jobs += [Job(JobRole.MAIN, 1, 7), Job(JobRole.JOIN, 2, 8)]
    for job, node in ((8, "n2"), (6, "n2")):  # one that joined, and one that is over
        staff.leaving(job, node)
    staff.agent_lost("n1", silent=True)
    looks(staff, slurm, coordinator, DOWN)
    staff.leaving(7, "n1")
    assert Leaving() not in coordinator.heard
    staff.leaving(7, "n2")
    assert coordinator.heard[-1] == Leaving()
    for work in coordinator.begun:
        work.close()  # type: ignore[attr-defined]


REFUSED = "dalsegno: {}: container: image /fsx/a.sqsh: No such file or directory\n"


def tried_too_often(staff: SlurmNodeSource, coordinator: FakeCoordinator, *refused: str) -> FakeCoordinator:
    """Simulate a run of two nodes on which no agent comes up; `refused` are nodes that refused the container."""
    coordinator.run = replace(coordinator.run, generation=0)
    staff.site.folder.agents_log.parent.mkdir(parents=True)
    staff.site.folder.agents_log.write_text("".join(REFUSED.format(node) for node in refused))
    staff._jobs.jobs.append(Job(JobRole.MAIN, 1, 7, nodes=("n1", "n2")))
    for _ in range(MOST_TRIES + 1):
        for node in ("n1", "n2"):
            staff._may_staff(node)
    for work in coordinator.begun:
        work.close()  # type: ignore[attr-defined]
    return coordinator


def test_image_missing_on_all_nodes_ends_the_run_with_one_report(
    staffed: Staffed,
):
    staff, _, coordinator = staffed
    assert tried_too_often(staff, coordinator, "n1", "n2").noted == []
    why = "the container could not be started on any node: image /fsx/a.sqsh: No such file or directory"
    assert coordinator.ends == [(NO_CONTAINER, why)]


def test_image_missing_on_one_node_excludes_that_node(staffed: Staffed):
    staff, _, coordinator = staffed
    tried_too_often(staff, coordinator, "n1")
    assert coordinator.noted[0].startswith("agents on n1 end right after they start (image /fsx/a.sqsh: No such file")
    assert [code for code, _ in coordinator.ends] == [1], "nothing is known of the other node"


def test_image_that_started_before_does_not_end_the_run(staffed: Staffed):
    staff, _, coordinator = staffed
    staff.agent_came("n1", again=False)
    assert len(tried_too_often(staff, coordinator, "n1", "n2").noted) == 2 and coordinator.ends == []


# Slow agents


@dataclass
class PlayedChild:
    """An srun that is alive."""

    def alive(self) -> bool:
        return True


def staffed_slowly(staff: SlurmNodeSource, coordinator: FakeCoordinator, times: int) -> AgentStep:
    """Let the staff check an overdue agent this many times, each long after the last."""
    step = AgentStep(cast(Child, PlayedChild()), ("n1",), began=time.monotonic() - 3 * LONG_S)
    staff._jobs.jobs.append(Job(JobRole.MAIN, 1, 7, ("n1",), steps=[step]))

    async def look() -> None:
        for _ in range(times):
            step.looked.pop("n1", None)
            staff.check_agents()
            while coordinator.begun:
                await coordinator.begun.pop()

    asyncio.run(look())
    return step


def test_slow_agent_is_not_started_twice(
    staffed: Staffed,
):
    """For example while a large image is imported. The site would record another request."""
    staff, _, coordinator = staffed
    step = staffed_slowly(staff, coordinator, times=2 * MOST_TRIES)
    assert staff.silent == {} and step.will_bring("n1", time.monotonic())
    (said,) = coordinator.noted
    assert said.startswith("agents are slow to start on n1 (image import or prolog); ")


@pytest.mark.parametrize("why", ["its task has ended", "its slurmd was started since"])
def test_agent_that_will_not_come_is_started_again(staffed: Staffed, why: str):
    staff, slurm, coordinator = staffed
    if why == "its task has ended":
        staff.site.folder.root.mkdir()
        staff.site.folder.agents_log.write_text("srun: error: n1: task 0: Killed\n")
    else:
        slurm.node = replace(IDLE, slurmd_started_at=int(time.time()))
    with pytest.raises(AssertionError, match="nothing is asked of Slurm"):
        staffed_slowly(staff, coordinator, times=1)
