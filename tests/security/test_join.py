"""Spares are lent only to a job of the user whose run lost a node, whatever comments other jobs have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.recovery.client import ask
from dalsegno.runs.status import RunPhase
from dalsegno.slurm.facts import JobInfo
from dalsegno.targets.local import LocalTarget
from tests.cluster.conftest import Cli, at_home, taken_down
from tests.cluster.test_run_kinds import WAITS, Person, end_with
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

FILE = """
name: one
target: local
partitions:
  - {name: train, nodes: 2, spares: 1, cpus: 4, memory: 1G, default: true}
users:
  - {name: ada}
  - {name: bob}
slurm: {accounting: false}
health: {per_hour: 100, max_out: 100%, checks: {pair-collective: off, load-product: off, load-memory: off}}
"""
SPARE = "train-3"
HIGHEST = 2**32 - 3


@pytest.fixture(scope="module")
def cluster(cache: Path) -> Iterator[Cli]:
    with taken_down(at_home(cache)) as cli:
        cli.ok("up", cli.file(FILE))
        (cli.home / "runs").mkdir()
        (cli.home / "runs").chmod(0o1777)
        eventually(lambda: phase(cli, SPARE) == "spare", 100)
        yield cli


def phase(cli: Cli, node: str) -> str:
    answer = ask(cli.home / "clusters/one/run/controller.sock", {"node": node}, 100)
    return str(answer.get("node", {}).get("phase", ""))


def test_spare_goes_to_the_run_that_lost_a_node_and_not_to_a_forged_request(cluster: Cli):
    target = LocalTarget(cluster.home / "clusters/one", cache=cluster.home / "cache")
    ada, bob = Person(cluster.home, cluster.uid), target.slurm_as("bob")
    work = cluster.home / "work"
    work.mkdir()
    work.chmod(0o777)
    run = ada.begin(work, WAITS, "-N", "2", "--nproc-per-node", "1")

    def claims(name: str, *more: str) -> int:
        words = [f"--job-name={name}", "--comment=dalsegno:join", "--exclusive", "--output=/dev/null", *more]
        return bob.submit("#!/bin/sh\nsleep 1000\n", words)

    # Forge three requests before the user's own: under another name, under the name of her run, and as an array.
    false = [claims("mine"), claims(run.id), claims(run.id, "--array=1-3")]
    lost = run.status.nodes[1].name

    def joined() -> list[JobInfo]:
        return [job for job in target.slurm.jobs() if job.name == run.id and job.nodes == (SPARE,)]

    try:
        cluster.ok("inject", "power-off", lost)
        eventually(lambda: phase(cluster, lost) != "in service", 100)  # by then the controller has seen his jobs
        mine = [job for job in target.slurm.jobs() if job.id in false or job.array_id in false]
        assert mine and all(job.priority < HIGHEST for job in mine)
    finally:
        bob.cancel(*false)  # a lent spare is in service, so any job may get it after the run
    eventually(joined, 100)
    assert joined()[0].uid == os.stat(run.folder.root).st_uid
    run.wait_for(lambda: len(run.status.nodes) == 2 and run.status.phase is RunPhase.RUNNING)
    assert phase(cluster, SPARE) == "lent"
    assert end_with(run, 0) == 0
    eventually(lambda: phase(cluster, SPARE) == "spare", 100)


def test_lent_spare_gets_no_job_of_another_user(cluster: Cli):
    """The rule holds before the borrowing job starts and after it ends, although the node is in service then."""
    target = LocalTarget(cluster.home / "clusters/one", cache=cluster.home / "cache")
    ada, bob = Person(cluster.home, cluster.uid), target.slurm_as("bob")
    eventually(lambda: all(phase(cluster, node) == "in service" for node in ("train-1", "train-2")), 200)
    work = cluster.home / "work2"
    work.mkdir()
    work.chmod(0o777)
    run = ada.begin(work, WAITS, "-N", "2", "--nproc-per-node", "1")
    waiting = [bob.submit("#!/bin/sh\nsleep 1000\n", ["--exclusive", "--output=/dev/null"]) for _ in range(4)]
    lost = run.status.nodes[1].name
    try:
        cluster.ok("inject", "power-off", lost)
        run.wait_for(lambda: len(run.status.nodes) == 2 and SPARE in [node.name for node in run.status.nodes], 200)
        assert phase(cluster, SPARE) == "lent"
        assert end_with(run, 0) == 0
        eventually(lambda: phase(cluster, SPARE) == "spare", 100)
        assert [job.nodes for job in target.slurm.jobs(ended=True) if job.id in waiting and SPARE in job.nodes] == []
        assert "dalsegno-lent" not in target.slurm.scontrol("show", "reservation")
    finally:
        bob.cancel(*waiting)
