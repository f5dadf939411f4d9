"""Which nodes a run takes again, by what Slurm says of them from one look to the next."""

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
from dalsegno.runs.coordinator.allocation import SlurmStaff
from dalsegno.runs.coordinator.events import Event, Leaving
from dalsegno.runs.coordinator.node_loss import LONG_S, MOST_TRIES
from dalsegno.runs.coordinator.site import ASK_SLURM_S
from dalsegno.runs.coordinator.slurm_jobs import AgentStep, Job
from dalsegno.runs.coordinator.staff import Boss
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
    """Knows one node."""

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
class PlayedBoss:
    """Of a run that goes on, and has no agents."""

    closing: bool = False
    ending: bool = False
    wanted: int = 1
    generation: int = 1
    present: frozenset[str] = frozenset()
    ready: frozenset[str] = frozenset()
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

    def soon(self, work: Awaitable[None]) -> None:
        self.begun.append(work)


def looks(staff: SlurmStaff, slurm: PlayedSlurm, boss: PlayedBoss, *states: NodeInfo) -> bool:
    """Slurm says these, one after the other; whether the node is taken again then."""

    async def all_of_them() -> None:
        for state in states:
            slurm.node = state
            await staff.ask_slurm()
        while boss.begun:
            await boss.begun.pop()

    asyncio.run(all_of_them())
    return "n1" not in staff.silent


@pytest.fixture
def staffed(tmp_path: Path) -> tuple[SlurmStaff, PlayedSlurm, PlayedBoss]:
    boss, slurm = PlayedBoss(), PlayedSlurm()
    site = PlayedSite(RunFolder(tmp_path / "train-x"), played=slurm)
    return SlurmStaff(site, cast(Boss, boss)), slurm, boss


def test_node_that_was_down_is_used_again_without_a_reboot(
    staffed: tuple[SlurmStaff, PlayedSlurm, PlayedBoss],
):
    staff, slurm, boss = staffed
    staff.agent_lost("n1", silent=True)
    assert not looks(staff, slurm, boss, IDLE, IDLE), "Slurm does not know yet that it is gone"
    assert not looks(staff, slurm, boss, DOWN) and staff.ask_again_s < ASK_SLURM_S
    assert looks(staff, slurm, boss, IDLE)
    assert staff.ask_again_s == ASK_SLURM_S


def test_node_that_was_out_of_service_is_used_again_after_repair(
    staffed: tuple[SlurmStaff, PlayedSlurm, PlayedBoss],
):
    staff, slurm, boss = staffed
    staff.leave_for_repair("n1")
    assert not looks(staff, slurm, boss, DRAINED, DOWN)
    assert looks(staff, slurm, boss, IDLE) and staff.excluded == []


def test_replacement_request_is_cancelled_when_the_node_recovers(
    staffed: tuple[SlurmStaff, PlayedSlurm, PlayedBoss],
):
    staff, slurm, boss = staffed
    boss.present = frozenset({"n1"})
    instead = Job(JobRole.JOIN, 2)
    staff._jobs.jobs += [Job(JobRole.MAIN, 1, nodes=("n1",)), instead]
    looks(staff, slurm, boss, IDLE, DRAINED, DRAINED)
    assert not instead.given_back, "it is to be mended, and another is waited for"
    assert looks(staff, slurm, boss, IDLE) and instead.given_back and instead not in staff._jobs.jobs


def test_returning_agent_is_refused_if_slurm_marked_its_node_down(
    staffed: tuple[SlurmStaff, PlayedSlurm, PlayedBoss],
):
    """The controller mends that node next, whoever is on it."""
    staff, slurm, boss = staffed
    staff.agent_lost("n1", silent=True)
    assert not looks(staff, slurm, boss, DOWN)
    assert not staff.agent_came("n1", again=True) and "n1" in staff.silent
    assert staff.agent_came("n1", again=False), "a new one was started there since: Slurm has it back"
    assert looks(staff, slurm, boss, IDLE) and staff.agent_came("n1", again=True)


def test_run_leaves_its_nodes_only_for_its_own_job(staffed: tuple[SlurmStaff, PlayedSlurm, PlayedBoss]):
    """An agent that was cut off is ended by Slurm when it is back: that is no word about the others."""
    staff, slurm, boss = staffed
    staff._jobs.jobs += [Job(JobRole.MAIN, 1, 7), Job(JobRole.JOIN, 2, 8)]
    for job, node in ((8, "n2"), (6, "n2")):  # one that joined, and one that is over
        staff.leaving(job, node)
    staff.agent_lost("n1", silent=True)
    looks(staff, slurm, boss, DOWN)
    staff.leaving(7, "n1")
    assert Leaving() not in boss.heard
    staff.leaving(7, "n2")
    assert boss.heard[-1] == Leaving()
    for work in boss.begun:
        work.close()  # type: ignore[attr-defined]


REFUSED = "dalsegno: {}: container: image /fsx/a.sqsh: No such file or directory\n"


def tried_too_often(staff: SlurmStaff, boss: PlayedBoss, *refused: str) -> PlayedBoss:
    """A run of two nodes on which no agent comes up; of these it is known that they refused the container."""
    boss.generation = 0
    staff.site.folder.agents_log.parent.mkdir(parents=True)
    staff.site.folder.agents_log.write_text("".join(REFUSED.format(node) for node in refused))
    staff._jobs.jobs.append(Job(JobRole.MAIN, 1, 7, nodes=("n1", "n2")))
    for _ in range(MOST_TRIES + 1):
        for node in ("n1", "n2"):
            staff._may_staff(node)
    for work in boss.begun:
        work.close()  # type: ignore[attr-defined]
    return boss


def test_image_missing_on_all_nodes_ends_the_run_with_one_report(
    staffed: tuple[SlurmStaff, PlayedSlurm, PlayedBoss],
):
    staff, _, boss = staffed
    assert tried_too_often(staff, boss, "n1", "n2").noted == []
    why = "the container could not be started on any node: image /fsx/a.sqsh: No such file or directory"
    assert boss.ends == [(NO_CONTAINER, why)]


def test_image_missing_on_one_node_excludes_that_node(staffed: tuple[SlurmStaff, PlayedSlurm, PlayedBoss]):
    staff, _, boss = staffed
    tried_too_often(staff, boss, "n1")
    assert boss.noted[0].startswith("agents on n1 end right after they start (image /fsx/a.sqsh: No such file")
    assert [code for code, _ in boss.ends] == [1], "for nothing is known of the other"


def test_image_that_started_before_does_not_end_the_run(staffed: tuple[SlurmStaff, PlayedSlurm, PlayedBoss]):
    staff, _, boss = staffed
    staff.agent_came("n1", again=False)
    assert len(tried_too_often(staff, boss, "n1", "n2").noted) == 2 and boss.ends == []


# Agents that take long to start -----------------------------------------------------------------------------


@dataclass
class PlayedChild:
    """An srun that lives."""

    def alive(self) -> bool:
        return True


def staffed_slowly(staff: SlurmStaff, boss: PlayedBoss, times: int) -> AgentStep:
    """An srun whose agent was due long ago; the staff looks after it so often, each time long after the last."""
    step = AgentStep(cast(Child, PlayedChild()), ("n1",), began=time.monotonic() - 3 * LONG_S)
    staff._jobs.jobs.append(Job(JobRole.MAIN, 1, 7, ("n1",), steps=[step]))

    async def look() -> None:
        for _ in range(times):
            step.looked.pop("n1", None)
            staff.check_agents()
            while boss.begun:
                await boss.begun.pop()

    asyncio.run(look())
    return step


def test_slow_agent_is_not_started_twice(
    staffed: tuple[SlurmStaff, PlayedSlurm, PlayedBoss],
):
    """An image of many gigabytes is imported there, say. The site would say that another was asked of Slurm."""
    staff, _, boss = staffed
    step = staffed_slowly(staff, boss, times=2 * MOST_TRIES)
    assert staff.silent == {} and step.will_bring("n1", time.monotonic())
    (said,) = boss.noted
    assert said.startswith("agents are slow to start on n1 (image import or prolog); ")


@pytest.mark.parametrize("why", ["its task has ended", "its slurmd was started since"])
def test_agent_that_will_not_come_is_started_again(staffed: tuple[SlurmStaff, PlayedSlurm, PlayedBoss], why: str):
    staff, slurm, boss = staffed
    if why == "its task has ended":
        staff.site.folder.root.mkdir()
        staff.site.folder.agents_log.write_text("srun: error: n1: task 0: Killed\n")
    else:
        slurm.node = replace(IDLE, slurmd_started_at=int(time.time()))
    with pytest.raises(AssertionError, match="nothing is asked of Slurm"):
        staffed_slowly(staff, boss, times=1)
