"""Tests of runs that start before Slurm notices that a node is down, and of a run that leaves a node for repair."""

from __future__ import annotations

import pytest

from dalsegno.runs.comment import nodes_left
from dalsegno.targets.local import LocalTarget
from tests.cluster.conftest import Cli
from tests.cluster.runs import IN_STEP, LONG_S, QUICK, Run, footprint, now

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
NODES = 4  # number of nodes of `cluster_for_runs`


def start_without(cli: Cli, off: str, name: str, *options: str) -> Run:
    """Start a run after this node has lost its power."""
    before = footprint(cli)
    cli.ok("inject", "power-off", off)
    run = Run.start(cli, cli.home / name, *QUICK, *options, "-J", name, script=IN_STEP)
    run.before = before  # the state from before the node was lost
    return run


def granted_without(cli: Cli, off: str, name: str, *options: str) -> Run:
    """Start a run to which Slurm has allocated the dead node.

    Slurm pings its nodes every few seconds. If Slurm notices the dead node too early, try again.
    """
    for attempt in "abcde":
        run = start_without(cli, off, f"{name}-{attempt}", *options)
        run.wait_for(lambda: run.journal("granted") or noticed(cli, off))  # noqa: B023
        if run.journal("granted"):
            return run
        cli.ok("cancel", run.id)
        cli.ok("up")
    raise AssertionError(f"Slurm knows of {off} each time before anybody asks for it")


def noticed(cli: Cli, node: str) -> bool:
    # The state is then idle* or down*
    return not cli.ok("shell", "--", "sinfo", "-h", "-n", node, "-o", "%T").strip().isalpha()


def held(run: Run) -> str:
    """Return the nodes that Slurm has allocated to the run."""
    return run.cli.ok("shell", "--", "squeue", "-h", "-n", run.id, "-o", "%N")


def test_run_starts_without_a_dead_node_and_returns_it(cluster_for_runs: Cli):
    at = now()
    run = granted_without(cluster_for_runs, "train-1", "off", "-N", "3")
    print(f"first step {run.wait_for_step(timeout_s=LONG_S) - at:.1f} s after it was asked for")
    assert run.journal("granted")[0]["nodes"] == ["train-1", "train-2", "train-3"]
    assert set(run.nodes) == {"train-2", "train-3", "train-4"}
    assert [each["text"] for each in run.journal("note")] == ["train-1 does not answer; the run continues without it"]
    run.wait_for(lambda: "train-1" not in (now_held := held(run)) and "[1" not in now_held)
    run.cli.ok("up")
    assert run.finish() == 0
    run.no_trace()


def test_run_with_a_missing_node_reports_it_and_uses_it_later(cluster_for_runs: Cli):
    run = granted_without(cluster_for_runs, "train-1", "lacks", "-N", "4")
    run.wait_for(lambda: run.status.message.startswith("needs 1 more node, but Slurm has none available:"))
    assert run.generation == 0
    run.cli.ok("up")
    run.wait_for_step(timeout_s=LONG_S)
    assert set(run.nodes) == {"train-1", "train-2", "train-3", "train-4"}
    assert len(run.journal("refused")) == 1
    assert run.finish() == 0
    run.no_trace()


def test_run_leaves_a_node_that_the_controller_is_about_to_repair(cluster_for_runs: Cli):
    folder = cluster_for_runs.home / "left"
    run = Run.start(cluster_for_runs, folder, *QUICK, "-N", "2", "--spares", "1", "-J", "left", script=IN_STEP)
    run.wait_for_step(timeout_s=LONG_S)
    run.wait_for(lambda: len(run.spares) == 1, LONG_S)
    node, spare = run.nodes[1], run.spares[0]
    slurm = LocalTarget(cluster_for_runs.home / "clusters/one", cache=cluster_for_runs.home / "cache").slurm
    slurm.drain(node, "dalsegno:reboot:xid[79] GPU 0 has fallen off the bus")
    run.wait_for_step(2, timeout_s=LONG_S)
    assert run.nodes == [run.nodes[0], spare] and run.status.lost_nodes == 0
    assert [entry["node"] for entry in run.journal("left")] == [node] and not run.journal("lost")
    generation = run.generation
    run.wait_for(lambda: {node} == {name for job in slurm.jobs() for name in nodes_left(job.comment)})
    slurm.set_down(node, "dalsegno:reboot:xid[79] GPU 0 has fallen off the bus")  # the controller sets the same reason
    run.wait_for(lambda: node not in {name for job in slurm.jobs() for name in job.nodes})
    slurm.resume(node)
    run.wait_for_step(after=now() + 0.5)
    assert run.generation == generation
    assert run.finish() == 0
    run.no_trace()
