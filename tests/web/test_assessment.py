"""The verdict of the web page, and its text for faults of nodes and GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dalsegno.overview.facts import FailingScrape
from dalsegno.overview.verdict import VerdictLevel, describe
from dalsegno.recovery.decisions.phase import HeldAction, NodePhase
from dalsegno.recovery.decisions.reason import describe_reason
from dalsegno.runs.status import RunPhase
from dalsegno.slurm.facts import NodeFlag, NodeState
from dalsegno.slurm.render import SPARE_REASON
from dalsegno.targets.base import DaemonStatus
from dalsegno.web.assessment import Assessor, assess_picture
from dalsegno.web.pages.cluster_map import gpu_text, verdict_line
from dalsegno.web.snapshot import (
    AgentReport,
    Automation,
    ClusterPicture,
    ControllerPart,
    HostPart,
    NodeRecoveryDetail,
    SlurmPart,
    SourceTrouble,
    gpu_views,
    node_view,
)
from dalsegno.wire.liveness import Presence
from tests.web.played import NOW, node, readings, run

NODES = SlurmPart((node("n1"), node("n2")))
REASON = "dalsegno:reboot:xid[79] Xid 79 on GPU 3: it fell off the bus"


@pytest.mark.parametrize(
    ("controller", "silent", "text", "level"),
    [
        (ControllerPart(), (), "healthy", VerdictLevel.GOOD),
        (
            ControllerPart(automation=Automation(True)),
            (),
            "healthy, but automatic recovery is paused",
            VerdictLevel.BAD,
        ),
        (
            ControllerPart(
                {"n1": NodeRecoveryDetail("n1", NodePhase.SUSPECTED, NOW, REASON, held_back=HeldAction.PAUSED)}
            ),
            (),
            "1 of 2 nodes has a fault and is not repaired",
            VerdictLevel.BAD,
        ),
        (
            ControllerPart({"n1": NodeRecoveryDetail("n1", NodePhase.REPAIRING, NOW, REASON)}),
            (),
            "1 of 2 nodes is being repaired",
            VerdictLevel.WARN,
        ),
        (
            ControllerPart(agents={"n1": AgentReport("n1", Presence.GONE)}),
            (),
            "1 of 2 nodes is off",
            VerdictLevel.BAD,
        ),
        (
            ControllerPart(),
            ("slurm", "controller"),
            "slurmctld does not answer; the controller does not answer, nodes are not repaired",
            VerdictLevel.BAD,
        ),
    ],
)
def test_verdict_is_worded_as_in_status(controller, silent, text, level):
    verdict = assess_picture(NODES, controller, HostPart(), (), silent, NOW)
    assert (describe(verdict), verdict.level) == (text, level)


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        (HostPart((DaemonStatus("n1", "node-exporter", False),)), "node-exporter on n1 is not running"),
        (HostPart((DaemonStatus("head", "slurmdbd", False),)), "slurmdbd on head is not running"),
        (
            HostPart(failing_scrapes=(FailingScrape("node", "n1"), FailingScrape("node", "n2"))),
            "healthy, but Prometheus cannot read node_exporter on n1 and 1 more",
        ),
        (  # a common cause is named once
            HostPart((DaemonStatus("n1", "node-exporter", False),), (FailingScrape("node", "n1"),)),
            "node-exporter on n1 is not running",
        ),
    ],
)
def test_verdict_counts_dead_daemons_and_failing_scrapes(hosts, text):
    assert describe(assess_picture(NODES, ControllerPart(), hosts, (), (), NOW)) == text


def test_daemons_of_a_node_that_is_off_are_not_counted():
    gone = ControllerPart(agents={"n1": AgentReport("n1", Presence.GONE)})
    hosts = HostPart((DaemonStatus("n1", "slurmd", False),), (FailingScrape("node", "n1"),))
    assert describe(assess_picture(NODES, gone, hosts, (), (), NOW)) == "1 of 2 nodes is off"


def test_verdict_says_how_training_is_affected():
    records = {"n1": NodeRecoveryDetail("n1", NodePhase.REPAIRING, NOW, REASON)}
    trains = run("llama-k3f9x", "ada", 1001, ("n2",))
    assert describe(assess_picture(NODES, ControllerPart(records), HostPart(), [trains], (), NOW)).endswith(
        "training is not affected"
    )
    restarts = replace(trains, status=replace(trains.status, phase=RunPhase.RESTARTING))
    text = describe(assess_picture(NODES, ControllerPart(records), HostPart(), [restarts], (), NOW))
    assert text.endswith("run llama-k3f9x is restarting")


def test_other_troubles_follow_the_verdict():
    assert "waiting for the first report" in verdict_line(ClusterPicture())
    picture = ClusterPicture(troubles=(SourceTrouble("runs", "the files of runs cannot be read"),))
    assert "healthy; the files of runs cannot be read" in verdict_line(picture)


def test_a_silent_source_is_named_once_and_any_other_trouble_in_addition():
    silent = SourceTrouble("slurm", "slurmctld does not answer", silent=True)
    hosts = HostPart((DaemonStatus("head", "slurmctld", False),))
    verdict = assess_picture(NODES, ControllerPart(), hosts, (), {"slurm"}, NOW)
    line = verdict_line(ClusterPicture(troubles=(silent,), verdict=verdict))
    assert "slurmctld is not running" in line and "does not answer" not in line
    refused = SourceTrouble("slurm", "squeue: error: Access denied")
    assert "squeue: error: Access denied" in verdict_line(ClusterPicture(troubles=(refused,), verdict=verdict))


def test_reasons_of_the_controller_are_shown_as_text():
    assert describe_reason(REASON) == "Xid 79 on GPU 3: it fell off the bus (remedy: reboot)"
    assert describe_reason("dalsegno:replace:gone") == "gone (remedy: replace)"
    assert describe_reason(SPARE_REASON) == "kept as a spare"
    assert describe_reason("fan is loud (by ada)") == "fan is loud (by ada)"
    info = node("n1", NodeState.IDLE, NodeFlag.DRAIN, reason=REASON)
    assert "dalsegno:" not in node_view(info, NodeRecoveryDetail("n1"), AgentReport("n1"), ()).reason


def test_held_back_node_says_that_it_is_not_repaired():
    record = NodeRecoveryDetail("n1", NodePhase.SUSPECTED, NOW, REASON, held_back=HeldAction.PAUSED)
    assert node_view(node("n1"), record, AgentReport("n1", Presence.CONNECTED), ()).label == "not repaired"


def test_gpu_that_the_agent_no_longer_reports_is_lost():
    known = tuple(each for each in readings(1, 0) if each.index != 3)
    views = gpu_views(node("n1"), AgentReport("n1", Presence.CONNECTED, gpus=known), ())
    assert [gpu.reading.index for gpu in views if gpu.lost] == [3]
    assert "lost" in gpu_text(views[3]) and "lost" not in gpu_text(views[2])
    silent = gpu_views(node("n1"), AgentReport("n1", Presence.GONE, gpus=known), ())
    assert not any(gpu.lost for gpu in silent), "nothing is known about a host that is gone"
    assert not any(gpu.lost for gpu in gpu_views(node("n1"), AgentReport("n1", Presence.CONNECTED), ()))


def test_verdict_is_made_again_only_if_it_may_differ():
    assessor, cold = Assessor(), ControllerPart(agents={"n1": AgentReport("n1", Presence.CONNECTED, NOW)})
    first = assessor.verdict(NODES, cold, HostPart(), (), ())
    warm = ControllerPart(agents={"n1": AgentReport("n1", Presence.CONNECTED, NOW + 1, gpus=readings(1, 8))})
    assert assessor.verdict(NODES, warm, HostPart(), (), ()) is first
    gone = ControllerPart(agents={"n1": AgentReport("n1", Presence.GONE, NOW)})
    assert describe(assessor.verdict(NODES, gone, HostPart(), (), ())) == "1 of 2 nodes is off"
    assert assessor.verdict(NODES, gone, HostPart(), (), ("slurm",)) != first
    dead = HostPart((DaemonStatus("n1", "slurmd", False),))
    assert describe(assessor.verdict(NODES, cold, dead, (), ())) == "slurmd on n1 is not running"
