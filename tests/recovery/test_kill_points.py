"""Tests that a controller killed before or after any commit of its journal finishes what it began."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dalsegno.health import Remedy
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.fakes import FakeCluster
from dalsegno.recovery.journal.store import Journal
from dalsegno.slurm.facts import NodeFlag
from dalsegno.slurm.render import SPARE_REASON
from tests.recovery.clinic import Clinic, quick_folder


class Killed(BaseException):
    """Raised in place of SIGKILL; no code of ours catches it."""


class MortalStore(Journal):
    """A journal that fails at the n-th commit.

    Before the commit, the written data is lost; after it, the data is kept.
    """

    commits = 0
    dies_at: tuple[int, str] = (0, "")

    def commit(self) -> None:
        MortalStore.commits += 1
        if MortalStore.dies_at == (MortalStore.commits, "before"):
            raise Killed
        super().commit()
        if MortalStore.dies_at == (MortalStore.commits, "after"):
            raise Killed


def xid_79(cluster: FakeCluster) -> None:
    cluster.break_gpu("n2", Remedy.REBOOT)


def power_cut(cluster: FakeCluster) -> None:
    cluster.start(7, "n1", "n2", comment="dalsegno:main")
    cluster.power_off("n2")


def bad_replacement(cluster: FakeCluster) -> None:
    cluster.bad_replacements = 1
    cluster.power_off("n2")


def needs_all(cluster: FakeCluster) -> None:
    cluster.break_gpu("n2", Remedy.REPLACE, says=Remedy.RESET)


def requeued_job(cluster: FakeCluster) -> None:
    cluster.start(7, "n2")
    cluster.power_off("n2")


def spare_in_need(cluster: FakeCluster) -> None:
    node = cluster.nodes["n2"]
    node.flags, node.reason = frozenset({NodeFlag.DRAIN}), SPARE_REASON
    cluster.start_run(8, "n1", "n3")
    cluster.power_off("n3")
    cluster.join(9)


def slurms_own_drain(cluster: FakeCluster) -> None:
    cluster.slurm_drains("n2", "Kill task failed")


def lost_while_disconnected(cluster: FakeCluster) -> None:
    cluster.blind = True
    cluster.see_again_at = cluster.now + 5
    cluster.power_off("n2")


STORIES = [
    slurms_own_drain,
    lost_while_disconnected,
    xid_79,
    power_cut,
    bad_replacement,
    needs_all,
    requeued_job,
    spare_in_need,
]
LONG = bool(os.environ.get("DALSEGNO_LONG"))
ONCE = ("reboot", "replace", "drain", "down", "resume")  # reset and evidence are harmless when repeated


def play(story: Callable[[FakeCluster], None], folder: Path, dies_at: tuple[int, str]) -> tuple[Clinic, bool]:
    """Run the whole scenario with one crash. The next controller continues with the same file."""
    MortalStore.commits, MortalStore.dies_at = 0, (0, "")
    spares = frozenset({"n2"}) if story is spare_in_need else frozenset()
    clinic = Clinic(FakeCluster.of(4), Policy(spares=spares, boot_s=4, begin_s=3, validate_s=4), folder, MortalStore)
    clinic.round()
    MortalStore.commits, MortalStore.dies_at = 0, dies_at
    story(clinic.cluster)
    try:
        clinic.settle()
    except Killed:
        clinic.store.close()
        clinic.open()
        clinic.settle()
        return clinic, True
    return clinic, False


def ending(clinic: Clinic) -> tuple[object, ...]:
    """Return the final state."""
    node, effects = clinic.cluster.nodes["n2"], clinic.effects("n2")
    unfinished = clinic.store.db.execute("SELECT kind FROM actions WHERE ended_at IS NULL").fetchall()
    return (
        clinic.phase("n2"),
        node.reason,
        node.machine.cured_by,
        {each: effects.count(each) for each in ONCE},
        len(list((clinic.folder / "evidence").glob("*/*"))),
        clinic.cluster.forbidden,
        unfinished,
        {job: (info.state, info.reason) for job, info in clinic.cluster.queue.items()},
    )


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = quick_folder()
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_after_a_kill_at_any_commit_every_action_is_done_exactly_once(
    story: Callable[[FakeCluster], None], memory: Path
):
    clinic, _ = play(story, memory / "alive", (0, ""))
    undisturbed, commits = ending(clinic), MortalStore.commits
    clinic.store.close()
    assert undisturbed[0] in (NodePhase.IN_SERVICE, NodePhase.LENT)
    assert commits >= 4
    for at, when in kill_points(story.__name__, commits):
        folder = memory / f"{at}-{when}"
        clinic, died = play(story, folder, (at, when))
        assert died
        assert ending(clinic) == undisturbed, f"killed {when} commit {at} of {commits}: {clinic.texts('n2')}"
        clinic.store.close()
        shutil.rmtree(folder)


def kill_points(story: str, commits: int) -> list[tuple[int, str]]:
    """Return all moments for a kill. The short form returns the same third of them each time."""
    points = [(at, when) for at in range(1, commits + 1) for when in ("before", "after")]
    return points if LONG else random.Random(story).sample(points, len(points) // 3)
