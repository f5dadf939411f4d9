"""The verdict on a cluster, for every state that a user may see."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dalsegno.health.result import Remedy
from dalsegno.overview.facts import Overview, RecoveryView, read_controller
from dalsegno.overview.verdict import VerdictCode, assess, describe, verdict_message
from dalsegno.recovery.decisions.phase import HeldAction, NodePhase
from dalsegno.runs.status import RunPhase
from dalsegno.slurm.render import SPARE_REASON
from dalsegno.targets.base import ClusterPhase, ClusterStatus
from tests.overview.clusters import (
    dead,
    healthy,
    held_back,
    node,
    replacing,
    run,
    with_node,
    with_record,
    with_runs,
    with_status,
)

CODE = VerdictCode
RUN = run("gpt-k3f9x")


def paused(overview: Overview) -> Overview:
    assert overview.controller is not None
    return replace(overview, controller=replace(overview.controller, paused=True))


def no_controller(overview: Overview) -> Overview:
    return replace(overview, controller=None)


def silent_slurm(overview: Overview) -> Overview:
    nodes = tuple(replace(each, state="unknown", gpus_used=None) for each in overview.status.nodes)
    return with_status(overview, jobs=None, nodes=nodes, phase=ClusterPhase.DEGRADED, problems=("silent",))


CASES = {
    "healthy": (healthy(), CODE.HEALTHY, "healthy"),
    "healthy, training": (with_runs(healthy(), RUN), CODE.HEALTHY, "healthy"),
    "healthy, a run in the queue": (
        with_runs(healthy(), run("gpt-k3f9x", RunPhase.WAITING, started=None)),
        CODE.HEALTHY,
        "healthy",
    ),
    "healthy, an elastic run is smaller": (
        with_runs(healthy(), run("gpt-k3f9x", world_size=3)),
        CODE.HEALTHY,
        "healthy",
    ),
    # The cluster as a whole
    "half-made": (
        with_status(healthy(), phase=ClusterPhase.HALF_MADE),
        CODE.INCOMPLETE,
        "the cluster is only partly created",
    ),
    "changing": (
        with_status(replacing(healthy()), phase=ClusterPhase.CHANGING),
        CODE.INCOMPLETE,
        "a change of the cluster is not finished",
    ),
    "gone": (Overview(ClusterStatus("demo", "local", ClusterPhase.GONE)), CODE.INCOMPLETE, "the cluster is gone"),
    "machine rebooted": (
        no_controller(
            silent_slurm(
                with_status(healthy(), daemons=tuple(replace(each, running=False) for each in healthy().status.daemons))
            )
        ),
        CODE.STOPPED,
        "no daemon of the cluster is running",
    ),
    # Daemons
    "slurmctld hangs": (
        with_runs(silent_slurm(healthy()), RUN),
        CODE.SLURM_SILENT,
        "slurmctld does not answer; training is not affected",
    ),
    "slurmctld dead": (
        silent_slurm(dead(healthy(), "slurmctld")),
        CODE.SLURM_SILENT,
        "slurmctld is not running",
    ),
    "munged dead": (silent_slurm(dead(healthy(), "munged")), CODE.SLURM_SILENT, "munged is not running"),
    "one of two slurmctld dead": (
        dead(healthy(), "slurmctld"),
        CODE.DAEMONS_DEAD,
        "slurmctld on head is not running",
    ),
    "controller dead": (
        with_runs(no_controller(dead(healthy(), "controller")), RUN, all_runs=False),
        CODE.CONTROLLER_SILENT,
        "the controller is not running, nodes are not repaired; your training is not affected",
    ),
    "controller hangs": (
        no_controller(healthy()),
        CODE.CONTROLLER_SILENT,
        "the controller does not answer, nodes are not repaired",
    ),
    "slurmctld and controller dead": (
        no_controller(silent_slurm(dead(healthy(), "slurmctld", "controller"))),
        CODE.SLURM_SILENT,
        "slurmctld is not running; the controller is not running, nodes are not repaired",
    ),
    "slurmdbd dead": (dead(healthy(), "slurmdbd"), CODE.DAEMONS_DEAD, "slurmdbd on head is not running"),
    "slurmd of a node in service dead": (
        dead(healthy(), "slurmd", host="train-3"),
        CODE.DAEMONS_DEAD,
        "slurmd on train-3 is not running",
    ),
    "two daemons dead": (
        dead(healthy(), "slurmd", "node-agent", host="train-3"),
        CODE.DAEMONS_DEAD,
        "2 daemons are not running",
    ),
    # Nodes that the controller repairs
    "replaced, nothing runs": (replacing(healthy()), CODE.NODES_REPAIRED, "1 of 5 nodes is being replaced"),
    "replaced, training goes on": (
        with_runs(replacing(healthy()), RUN),
        CODE.NODES_REPAIRED,
        "1 of 5 nodes is being replaced; training is not affected",
    ),
    "two replaced": (
        replacing(replacing(healthy()), "train-4"),
        CODE.NODES_REPAIRED,
        "2 of 5 nodes are being replaced",
    ),
    "the only node is replaced": (
        replacing(healthy(1), "train-1"),
        CODE.NODES_REPAIRED,
        "1 of 1 node is being replaced",
    ),
    "rebooted": (
        with_record(healthy(), "train-1", NodePhase.REPAIRING, tried=(Remedy.RESET, Remedy.REBOOT)),
        CODE.NODES_REPAIRED,
        "1 of 5 nodes is being rebooted",
    ),
    "reset": (
        with_record(healthy(), "train-1", NodePhase.REPAIRING, tried=(Remedy.RESET,)),
        CODE.NODES_REPAIRED,
        "1 of 5 nodes is being reset",
    ),
    "repaired in an unknown way": (
        with_record(healthy(), "train-1", NodePhase.REPAIRING),
        CODE.NODES_REPAIRED,
        "1 of 5 nodes is being repaired",
    ),
    "down": (
        with_record(healthy(), "train-1", NodePhase.DOWN),
        CODE.NODES_REPAIRED,
        "1 of 5 nodes is down and will be repaired",
    ),
    "drained": (
        with_record(healthy(), "train-1", NodePhase.DRAINED),
        CODE.NODES_REPAIRED,
        "1 of 5 nodes is drained and will be repaired",
    ),
    "validated after a repair": (
        with_record(healthy(), "train-1", NodePhase.VALIDATING),
        CODE.NODES_REPAIRED,
        "1 of 5 nodes is being validated",
    ),
    "repaired while slurmctld is silent": (
        silent_slurm(replacing(healthy())),
        CODE.SLURM_SILENT,
        "slurmctld does not answer; 1 of 5 nodes is being replaced",
    ),
    # Nodes that nothing repairs
    "needs an administrator": (
        with_runs(with_record(healthy(), "train-1", NodePhase.NEEDS_ADMIN), RUN),
        CODE.NODES_FAULTY,
        "1 of 5 nodes needs an administrator; training is not affected",
    ),
    "observed only": (
        held_back(healthy(), "train-1", HeldAction.OBSERVING),
        CODE.NODES_FAULTY,
        "1 of 5 nodes has a fault and is not repaired",
    ),
    "held back because recovery is paused": (
        paused(held_back(healthy(), "train-1", HeldAction.PAUSED)),
        CODE.NODES_FAULTY,
        "1 of 5 nodes has a fault and is not repaired; automatic recovery is paused",
    ),
    "just lost power": (
        with_node(healthy(), "train-1", state="off", off=True),
        CODE.NODES_FAULTY,
        "1 of 5 nodes is off",
    ),
    "down in Slurm without a controller": (
        no_controller(with_node(healthy(), "train-1", state="down*", reason="Not responding", reason_user="slurm")),
        CODE.CONTROLLER_SILENT,
        "the controller does not answer, nodes are not repaired; 1 of 5 nodes is out of service",
    ),
    "drained by Slurm": (
        with_node(healthy(), "train-1", state="drained", reason="Prolog error", reason_user="root"),
        CODE.NODES_FAULTY,
        "1 of 5 nodes is out of service",
    ),
    "not responding": (
        with_node(healthy(), "train-1", state="idle*"),
        CODE.NODES_FAULTY,
        "1 of 5 nodes does not respond to slurmctld",
    ),
    "unknown to Slurm": (
        with_node(healthy(), "train-1", state="unknown"),
        CODE.NODES_FAULTY,
        "1 of 5 nodes is unknown to slurmctld",
    ),
    # Nodes of people, spares, suspicions
    "drained by an administrator": (
        with_node(healthy(), "train-1", state="drained", reason="new RAM", reason_user="bob"),
        CODE.NODES_LEFT_ALONE,
        "1 of 5 nodes is kept out of service by an administrator",
    ),
    "repaired by the platform": (
        with_node(healthy(), "train-1", state="drained", reason="Action:Replace", reason_user="root"),
        CODE.NODES_REPAIRED,
        "1 of 5 nodes is being repaired",
    ),
    "a spare": (
        with_record(
            with_node(healthy(), "train-5", state="drained", reason=SPARE_REASON, spare=True),
            "train-5",
            NodePhase.SPARE,
            reason="",
        ),
        CODE.HEALTHY,
        "healthy",
    ),
    "a spare without a controller": (
        no_controller(with_node(healthy(), "train-5", state="drained", reason=SPARE_REASON, spare=True)),
        CODE.CONTROLLER_SILENT,
        "the controller does not answer, nodes are not repaired",
    ),
    "a spare is validated": (
        with_record(
            with_node(healthy(), "train-5", state="drained", reason=SPARE_REASON, spare=True),
            "train-5",
            NodePhase.VALIDATING,
            reason="",
        ),
        CODE.HEALTHY,
        "healthy",
    ),
    "a spare is lent": (
        with_record(with_node(healthy(), "train-5", spare=True), "train-5", NodePhase.LENT, reason=""),
        CODE.HEALTHY,
        "healthy",
    ),
    "suspected": (
        with_record(healthy(), "train-1", NodePhase.SUSPECTED),
        CODE.NODES_SUSPECTED,
        "1 of 5 nodes may have a fault",
    ),
    "several conditions": (
        with_node(
            with_record(replacing(healthy()), "train-1", NodePhase.NEEDS_ADMIN),
            "train-3",
            state="drained",
            reason="new RAM",
            reason_user="bob",
        ),
        CODE.NODES_FAULTY,
        "1 of 5 nodes needs an administrator, 1 is being replaced, 1 is kept out of service by an administrator",
    ),
    "more conditions than fit": (
        with_node(
            with_record(
                with_record(replacing(healthy()), "train-1", NodePhase.NEEDS_ADMIN), "train-4", NodePhase.VALIDATING
            ),
            "train-3",
            state="drained",
            reason="new RAM",
            reason_user="bob",
        ),
        CODE.NODES_FAULTY,
        "1 of 5 nodes needs an administrator, 1 is being replaced, 1 is being validated, 1 more has other problems",
    ),
    # Training
    "a run restarts after a fault": (
        with_runs(replacing(healthy()), run("gpt-k3f9x", RunPhase.RESTARTING), run("mlp-00000")),
        CODE.NODES_REPAIRED,
        "1 of 5 nodes is being replaced; run gpt-k3f9x is restarting",
    ),
    "a run waits for nodes": (
        with_runs(replacing(healthy()), run("gpt-k3f9x", RunPhase.WAITING)),
        CODE.NODES_REPAIRED,
        "1 of 5 nodes is being replaced; run gpt-k3f9x waits for nodes",
    ),
    "a run is smaller": (
        with_runs(replacing(healthy()), run("gpt-k3f9x", world_size=24, nproc_per_node=8)),
        CODE.NODES_REPAIRED,
        "1 of 5 nodes is being replaced; run gpt-k3f9x continues on 3 of 4 nodes",
    ),
    "runs in the queue": (
        with_runs(
            replacing(healthy()),
            RUN,
            run("a-1", RunPhase.WAITING, started=None),
            run("b-1", RunPhase.WAITING, started=None),
        ),
        CODE.NODES_REPAIRED,
        "1 of 5 nodes is being replaced; training is not affected, 2 runs wait in the queue",
    ),
    "two runs restart, one waits": (
        with_runs(
            replacing(healthy()),
            run("a-1", RunPhase.RESTARTING),
            run("b-1", RunPhase.STOPPING),
            run("c-1", RunPhase.WAITING),
        ),
        CODE.NODES_REPAIRED,
        "1 of 5 nodes is being replaced; 2 runs are restarting, run c-1 waits for nodes",
    ),
    "a run restarts after a bug": (
        with_runs(healthy(), run("gpt-k3f9x", RunPhase.RESTARTING)),
        CODE.TRAINING_AFFECTED,
        "the cluster is healthy; run gpt-k3f9x is restarting",
    ),
    "a run has no coordinator": (
        with_runs(healthy(), run("gpt-k3f9x", silent=True)),
        CODE.TRAINING_AFFECTED,
        "the cluster is healthy; run gpt-k3f9x has no coordinator",
    ),
    "a run ends": (
        with_runs(replacing(healthy()), run("a-1", RunPhase.ENDING)),
        CODE.NODES_REPAIRED,
        "1 of 5 nodes is being replaced",
    ),
    "only the runs of this user are known": (
        with_runs(replacing(healthy()), RUN, all_runs=False),
        CODE.NODES_REPAIRED,
        "1 of 5 nodes is being replaced; your training is not affected",
    ),
    # Remarks
    "paused": (paused(healthy()), CODE.RECOVERY_PAUSED, "healthy, but automatic recovery is paused"),
    "an injected fault": (
        with_status(healthy(), phase=ClusterPhase.DEGRADED, problems=("injected: net-slow on train-1",)),
        CODE.PROBLEMS,
        "healthy, but there is 1 warning",
    ),
    "paused, with warnings": (
        paused(with_status(healthy(), phase=ClusterPhase.DEGRADED, problems=("one", "two"))),
        CODE.RECOVERY_PAUSED,
        "healthy, but automatic recovery is paused and there are 2 warnings",
    ),
    "not created by Dal Segno": (
        Overview(ClusterStatus("Slurm", "slurm", ClusterPhase.UP, (node("n1"),)), None, has_controller=False),
        CODE.HEALTHY,
        "healthy",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_verdict_names_the_most_urgent_fault_and_says_what_it_means_for_training(name: str):
    overview, code, text = CASES[name]
    verdict = assess(overview)
    assert (verdict.code, describe(verdict)) == (code, text)


@pytest.mark.parametrize("phase", [NodePhase.DRAINED, NodePhase.DOWN])
def test_node_that_its_cloud_takes_is_not_said_to_be_repaired(phase: NodePhase):
    reason = "dalsegno:drain:cloud-notice[spot:2026-11-18T12:02:00Z] the cloud provider ends this instance"
    verdict = assess(with_runs(with_record(healthy(), "train-2", phase, reason=reason), RUN))
    assert describe(verdict) == "1 of 5 nodes is ended by its cloud provider; training is not affected"


def test_json_of_a_verdict_has_codes_nodes_and_runs():
    message = verdict_message(assess(with_runs(replacing(healthy()), RUN)))
    assert message == {
        "code": "nodes-repaired",
        "text": "1 of 5 nodes is being replaced; training is not affected",
        "codes": ["nodes-repaired"],
        "nodes": [{"condition": "replacing", "nodes": ["train-2"]}],
        "runs": [{"impact": "unaffected", "runs": ["gpt-k3f9x"]}],
    }


def test_every_condition_and_phase_of_the_controller_has_a_text():
    for phase in NodePhase:
        for held in HeldAction:
            assert describe(assess(with_record(healthy(), "train-1", phase, held_back=held)))


def test_controller_of_another_version_is_understood():
    nodes = {
        "nodes": [
            {"node": "n1", "phase": "mending"},
            {"node": "n2", "phase": "new phase", "tried": ["dance"]},
            {"node": "n3", "phase": "given up"},
        ]
    }
    view = read_controller(nodes, {})
    assert [(each.phase, each.tried) for each in view.nodes.values()] == [
        (NodePhase.REPAIRING, ()),
        (NodePhase.UNKNOWN, ()),
        (NodePhase.NEEDS_ADMIN, ()),
    ]
    assert not view.paused and view.slurm_users == RecoveryView().slurm_users
