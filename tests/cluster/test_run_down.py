"""Tests of removing a cluster with active runs: they end with it and do not affect a later cluster."""

from __future__ import annotations

import json
import os
import pty
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

import pytest

from dalsegno.runs.status import RunPhase
from tests.cluster.conftest import Cli
from tests.cluster.runs import QUICK, Run
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CLUSTER = """
name: one
target: local
partitions:
  - {name: train, nodes: 2, cpus: 4, memory: 2G}
users:
  - {name: ada}
slurm: {accounting: false}
health: {mode: observe}  # what is broken here stays so
"""
WAITS = "import time\nprint('begins', flush=True)\ntime.sleep(1000)\n"
TWO = (*QUICK, "-N", "2")


@pytest.fixture
def run(cli: Cli) -> Run:
    """Return a run that trains on two nodes."""
    cli.ok("up", cli.file(CLUSTER))
    run = Run.start(cli, cli.home / "work", *TWO, script=WAITS, args=())
    run.wait_for(lambda: run.status.phase is RunPhase.RUNNING and run.log(1))
    return run


def listed(run: Run) -> dict[str, object]:
    """Return the run's entry in `dalsegno runs --json`."""
    return next(each for each in json.loads(run.cli.ok("runs", "--json")) if each["run"] == run.id)


def follow(run: Run) -> Popen[str]:
    argv = run.cli.argv("logs", "-f", run.id)
    follower = Popen(argv, env=run.cli.env, stdout=PIPE, stderr=PIPE, text=True)
    assert follower.stdout is not None and follower.stdout.readline()
    return follower


def test_down_in_a_terminal_asks_for_confirmation(run: Run):
    ours, theirs = pty.openpty()
    asked = Popen(run.cli.argv("down", "one"), env=run.cli.env, stdin=theirs, stdout=DEVNULL, stderr=theirs)
    os.write(ours, b"n\n")
    assert asked.wait(100) == 1
    said = os.read(ours, 10_000).decode()
    os.close(theirs)
    os.close(ours)
    assert f"ends 1 run ({run.id})" in said and "remove one? [y/N]" in said and "one was not changed" in said
    assert run.status.phase is RunPhase.RUNNING
    assert run.cli.run("down", "one", "--yes").code == 0


def test_down_lists_consequences_and_cancels_runs(run: Run):
    (run.cli.home / "clusters/one/home/ada/checkpoint").write_text("weeks of work")
    run.cli.ok("shell", "--", "sbatch", "-o", "/dev/null", "--wrap", "sleep 1000")
    follower = follow(run)
    said = run.cli.run("down", "one").err
    assert f"ends 1 run ({run.id})\nends 1 job (2 of root)\n" in said
    assert "deletes 1 home folder (ada), with all runs and checkpoints in them" in said
    _, last = follower.communicate(timeout=100)
    assert (follower.returncode, "has ended: cancelled" in last) == (0, True), last
    found = listed(run)
    assert (found["state"], found["exit_code"]) == ("cancelled", 143)
    assert found["message"] == "cancelled: its cluster was taken down"


def test_run_of_removed_cluster_is_lost_and_cancel_affects_no_other_job(run: Run):
    """The end of such a run could not be recorded, as for another user's run."""
    before = run.folder.status.read_text()
    run.cli.ok("down", "one")
    forget_the_end(run, before)
    found = listed(run)
    assert (found["state"], found["message"], found["ended"]) == (
        "lost", "lost: its cluster is gone", found["updated"],
    )  # fmt: skip
    run.cli.ok("up")
    other = run.cli.ok("shell", "--", "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 1000").strip()
    assert other == str(run.status.jobs[0]), "job ids of the new cluster start at 1 again"
    again = run.cli.run("logs", "-f", run.id)
    assert (again.code, f"error: run {run.id} is lost: its cluster is gone" in again.err) == (1, True), again.err
    run.cli.ok("cancel", run.id)
    eventually(lambda: job_states(run.cli) == {other: "RUNNING"})
    assert listed(run)["state"] == "cancelled"


def test_run_and_cancel_fail_fast_without_head_and_record_the_request(run: Run):
    assert f"it is the job of run {run.id}" in run.cli.ok("why", str(run.status.jobs[0]))
    assert "recovery does not repair it" in run.cli.run("inject", "power-off", "head").err
    began = time.monotonic()
    refused = run.cli.run("run", *TWO, "train.py", cwd=run.work)
    assert (refused.code, "slurmctld of one does not answer" in refused.err) == (1, True), refused.err
    noted = run.cli.run("cancel", run.id)
    assert (noted.code, "has not ended yet, but the request is recorded" in noted.err) == (1, True), noted.err
    assert "squeue" not in noted.err and "`dalsegno up`" in noted.err
    assert time.monotonic() - began < 60
    run.cli.ok("up")
    run.wait_for(lambda: run.status.over)
    assert listed(run)["state"] == "cancelled"


def forget_the_end(run: Run, status: str) -> None:
    Path(run.folder.status).write_text(status)
    run.folder.cancel.unlink()


def job_states(cli: Cli) -> dict[str, str]:
    lines = cli.ok("shell", "--", "squeue", "-h", "-o", "%i %T").splitlines()
    return {job: state for job, state in (line.split() for line in lines)}
