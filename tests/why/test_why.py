"""The verdict and the next command for a waiting job, a node out of service and an ended run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dalsegno.health import Remedy
from dalsegno.recovery.decisions.forecast import Forecast
from dalsegno.recovery.decisions.phase import HeldAction, NodePhase
from dalsegno.recovery.decisions.reason import Topic
from dalsegno.runs.hang import HangReport, HangSuspect
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.status import RunCause, RunPhase, RunStatus, SlowRank
from dalsegno.slurm.facts import JobInfo, JobState, NodeFlag, NodeInfo, NodeState
from dalsegno.slurm.parse.messages import PendingReason
from dalsegno.slurm.parse.nodes import NodeEvent
from dalsegno.why import (
    Conclusion,
    ControllerView,
    Moment,
    explain_job,
    explain_node,
    explain_run,
    merge_timelines,
    moments_of_job,
    moments_of_node,
    moments_of_run,
    nodes_given,
    nodes_of_run,
    read_controller_view,
    within,
)
from dalsegno.why.job import WAITS, why_it_waits
from dalsegno.why.job import aftermath_s as job_aftermath_s
from dalsegno.why.run import aftermath_s as run_aftermath_s
from dalsegno.why.run import generation_to_explain

REBOOT, REPLACE = Remedy.REBOOT, Remedy.REPLACE


def job(state: JobState, **what: object) -> JobInfo:
    return JobInfo(7, "train", "ada", state, partition="gpu", **what)  # type: ignore[arg-type]


def node(*flags: NodeFlag, state: NodeState = NodeState.IDLE, reason: str = "", **what: object) -> NodeInfo:
    return NodeInfo("gpu-3", state, frozenset(flags), reason=reason, **what)  # type: ignore[arg-type]


def run(phase: RunPhase, **what: object) -> RunStatus:
    return RunStatus("train-x", "train", "ada", phase, 0.0, 9.0, **what)  # type: ignore[arg-type]


# Jobs


def test_job_that_waits_for_nodes_is_explained():
    assert explain_job(job(JobState.PENDING, reason="Resources")) == Conclusion(
        "job 7 waits: it is next in line, but the nodes it needs are busy", "squeue -p gpu --states=RUNNING"
    )


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("QOSMaxJobsPerUserLimit", "its user runs as many jobs as the QOS allows"),
        ("QOSMaxGRESPerUser", "it requests more than its QOS allows"),
        ("(ReqNodeNotAvail, UnavailableNodes:gpu-3)", "nodes it needs are out of service or reserved"),
        ("DependencyNeverSatisfied", "the job it depends on did not end as required, so it will never start"),
        ("SomethingNew", "Slurm's reason is `SomethingNew`"),
        ("", "Slurm has not given a reason yet"),
    ],
)
def test_pending_reason_is_explained(reason: str, sentence: str):
    assert why_it_waits(reason, "7", "gpu", "ada").sentence == sentence


def test_every_reason_has_a_sentence_and_a_command():
    assert set(PendingReason) - set(WAITS) == {PendingReason.UNKNOWN}
    for reason in WAITS:
        found = why_it_waits(reason.value, "7", "gpu", "ada")
        assert found.sentence and "{" not in found.next


def test_failed_job_names_the_cause_and_its_output():
    failed = job(JobState.FAILED, exit_code=3, stdout="/home/ada/slurm-7.out")
    assert explain_job(failed) == Conclusion(
        "job 7 ended with exit code 3: its program failed", "tail /home/ada/slurm-7.out"
    )
    assert "SIGKILL" in explain_job(job(JobState.FAILED, exit_signal=9)).sentence
    assert "lost a node" in explain_job(job(JobState.NODE_FAIL)).sentence
    assert "time limit" in explain_job(job(JobState.TIMEOUT)).sentence


def test_expected_start_of_a_pending_job_is_not_in_the_timeline():
    waits = job(JobState.PENDING, submitted_at=10, started_at=99)
    assert list(moments_of_job(waits)) == [Moment(10, "slurm", "job 7 of ada was submitted to gpu")]
    ended = job(JobState.COMPLETED, submitted_at=10, started_at=12, ends_at=30, nodes=("gpu-1", "gpu-2"))
    assert [moment.text for moment in moments_of_job(ended)] == [
        "job 7 of ada was submitted to gpu",
        "job 7 started on gpu-1, gpu-2",
        "job 7 ended: COMPLETED, exit code 0",
    ]


def test_job_of_a_run_names_the_run_and_its_role():
    runs = job(JobState.RUNNING, comment="dalsegno:main")
    assert explain_job(runs, "soak") == Conclusion("job 7 is running; it is the job of run soak", "dalsegno why soak")
    gone = job(JobState.CANCELLED, comment="dalsegno:join")
    assert explain_job(gone, "soak").sentence == ("job 7 was cancelled; run soak submitted it to replace a lost node")
    assert explain_job(job(JobState.PENDING, reason="Resources"), "soak").next == "squeue -p gpu --states=RUNNING"


def test_pending_job_names_its_excluded_nodes():
    waits = job(JobState.PENDING, reason="BadConstraints", excluded=("gpu-3",))
    assert explain_job(waits).sentence.endswith("; nodes are excluded: gpu-3")
    assert explain_job(waits, "soak").sentence.endswith("; run soak excludes gpu-3: nodes it uses or has left")
    assert "gpu-3" not in explain_job(job(JobState.RUNNING, excluded=("gpu-3",))).sentence


def test_node_events_after_the_end_count_only_for_failures():
    assert job_aftermath_s(job(JobState.NODE_FAIL)) == run_aftermath_s(run(RunPhase.ENDED, exit_code=1)) == 60
    assert job_aftermath_s(job(JobState.COMPLETED)) == 1, "Slurm's times are whole seconds"
    assert {run_aftermath_s(run(RunPhase.ENDED, exit_code=code)) for code in (0, 75, 143)} == {0}
    assert within([Moment(1.0, "a", ""), Moment(2.0, "b", "")], 1.5, 2.0) == [Moment(2.0, "b", "")]


# Nodes


def test_node_that_the_cloud_takes_is_not_expected_to_be_repaired():
    notice = "the cloud provider ends this instance (spot: terminate)"
    reason = f"dalsegno:drain:cloud-notice[spot:2026-11-18T12:02:00Z] {notice}"
    drained = node(NodeFlag.DRAIN, reason=reason)
    found = explain_node(drained, ControllerView(NodePhase.DRAINED))
    assert found.sentence.endswith(
        "the cloud provider ends this instance (spot: terminate); "
        "it is not repaired, and returns to service when the cloud has given it another machine"
    )


def test_node_whose_file_server_is_away_is_not_expected_to_be_repaired():
    text = "/home does not answer within 1.25 s: NFS server 10.0.0.1 does not answer"
    drained = node(NodeFlag.DRAIN, reason=f"dalsegno:drain:file-systems[server] {text}")
    found = explain_node(drained, ControllerView(NodePhase.DRAINED, ahead=Forecast(None, "its file server is away")))
    expected = f"{text}; it is not repaired, and returns to service when the server answers"
    assert found.sentence == f"gpu-3 was drained by the controller: {expected}"


def test_node_drained_by_the_controller_names_the_fault_and_the_repair():
    drained = node(NodeFlag.DRAIN, reason="dalsegno:reboot:xid[79] GPU 0 has fallen off the bus")
    assert explain_node(drained, ControllerView(NodePhase.REPAIRING)) == Conclusion(
        "gpu-3 was drained by the controller: xid 79 (GPU 0 has fallen off the bus); it is being rebooted",
        "dalsegno nodes show gpu-3",
    )


SPENT = "it was rebooted 2 times for this fault within a day, the limit"


@pytest.mark.parametrize(
    ("controller", "does"),
    [
        (ControllerView(NodePhase.DRAINED, ahead=Forecast(REBOOT)), "as soon as its jobs have ended, it is rebooted"),
        (ControllerView(NodePhase.DOWN, ahead=Forecast(REPLACE, SPENT)),
         f"as soon as its jobs have ended, it is replaced by another machine ({SPENT})"),
        (ControllerView(NodePhase.DRAINED, ahead=Forecast(None, SPENT)),
         f"it is not repaired automatically any more: {SPENT}"),
        (ControllerView(NodePhase.DRAINED, ahead=Forecast(REBOOT, held=HeldAction.OBSERVING)),
         "as soon as its jobs have ended, it would be rebooted, but the controller only observes"),
        (ControllerView(NodePhase.DRAINED, ahead=Forecast(Remedy.DRAIN)),
         "it stays out of service until that check passes: an administrator must repair it"),
        (ControllerView(NodePhase.REPAIRING), "it is being rebooted"),
        (ControllerView(NodePhase.REPAIRING, tried=REPLACE), "it is being replaced by another machine"),
        (ControllerView(NodePhase.VALIDATING), "it is being validated"),
        (ControllerView(NodePhase.VALIDATING, "paused; would return it to service", HeldAction.PAUSED),
         "paused; would return it to service"),
        (ControllerView(), "there is no controller to repair it"),
    ],
)  # fmt: skip
def test_next_repair_step_of_a_drained_node_is_named(controller: ControllerView, does: str):
    drained = node(NodeFlag.DRAIN, reason="dalsegno:reboot:xid[79] GPU 0 has fallen off the bus")
    assert explain_node(drained, controller).sentence.endswith(f"; {does}")


def test_current_fault_comes_from_the_controller():
    down = node(state=NodeState.DOWN, reason="dalsegno:replace:gone neither its agent nor slurmd answers")
    flaps = {"phase": "drained", "reason": "dalsegno:drain:fabric-flaps efa0 went down 3 times within 6 h"}
    assert explain_node(down, read_controller_view({"node": flaps, "ahead": {"how": "drain"}})) == Conclusion(
        "gpu-3 was drained by the controller: fabric-flaps (efa0 went down 3 times within 6 h); "
        "it stays out of service until that check passes: an administrator must repair it",
        "dalsegno health --node gpu-3",
    )


def test_node_returned_to_service_despite_a_fault_is_explained():
    controller = read_controller_view({"node": {"phase": "in service", "excused": ["gpu-temperature"]}})
    assert explain_node(node(), controller) == Conclusion(
        "gpu-3 is in service despite gpu-temperature: a user returned it to service",
        "dalsegno health --node gpu-3",
    )


def test_paused_repair_names_the_resume_command():
    drained = node(NodeFlag.DRAIN, reason="dalsegno:reboot:xid[79] GPU 0 has fallen off the bus")
    ahead = {"how": "reboot", "why": "", "held_back": "paused"}
    found = explain_node(drained, read_controller_view({"node": {"phase": "drained"}, "ahead": ahead}))
    assert found.sentence.endswith("it would be rebooted, but automation is paused")
    assert found.next == "dalsegno automation resume"


def test_suspected_and_abandoned_nodes_are_explained():
    spent = "gpu-count 7 of 8 GPUs; no action: 4 nodes were taken out; `dalsegno automation resume` resets it"
    assert explain_node(node(), ControllerView(NodePhase.SUSPECTED, spent, HeldAction.HOUR)) == Conclusion(
        f"gpu-3 is in service but suspected: {spent}", "dalsegno automation resume"
    )
    assert (
        explain_node(node(), ControllerView(NodePhase.SUSPECTED, spent, HeldAction.OUT)).next
        == "dalsegno health --node gpu-3"
    )
    blind = ControllerView(NodePhase.SUSPECTED, "its agent is dead: its health is not known", about=Topic.AGENT_DEAD)
    assert explain_node(node(), blind).next == "dalsegno up", "it restarts the agent, which cannot be asked"
    unrepaired = explain_node(
        node(NodeFlag.DRAIN, reason="dalsegno:drain:disk full"), ControllerView(NodePhase.NEEDS_ADMIN, "3 times")
    )
    says = "gpu-3 is not repaired automatically any more: 3 times"
    assert unrepaired == Conclusion(says, "dalsegno nodes show gpu-3")


def test_node_drained_by_a_user_is_not_touched():
    drained = node(NodeFlag.DRAIN, reason="new RAM", reason_user="bob")
    assert explain_node(drained) == Conclusion(
        "gpu-3 was drained by bob: new RAM; the controller does not touch it",
        "scontrol update nodename=gpu-3 state=resume",
    )


def test_resume_is_not_suggested_while_checks_fail():
    lost, well = ({"at": at, "check": "xid", "verdict": verdict, "text": "GPU 0 is off the bus"} for at, verdict in
                  ((1.0, "failed"), (2.0, "passed")))  # fmt: skip
    drained = node(NodeFlag.DRAIN, reason="new RAM", reason_user="bob")
    found = explain_node(drained, read_controller_view({"checks": [lost]}))
    assert found.sentence.endswith(
        "the controller does not touch it. It fails its health checks: xid (GPU 0 is off the bus)"
    )
    assert found.next == "dalsegno health --node gpu-3"
    assert explain_node(drained, read_controller_view({"checks": [lost, well]})) == explain_node(drained)


def test_slurm_events_stay_in_the_timeline_of_a_returned_node():
    drained = NodeEvent("gpu-3", 100, "DRAIN", "bob", "new RAM")
    result = Moment(100, "slurm", "drain: new RAM (bob)")
    assert list(moments_of_node(node(), [drained])) == [result]
    again = node(NodeFlag.DRAIN, reason="new RAM", reason_user="bob", reason_at=101)
    assert list(moments_of_node(again, [drained])) == [result], "the same"
    later = node(NodeFlag.DRAIN, reason="new RAM", reason_user="bob", reason_at=500)
    assert [moment.at for moment in moments_of_node(later, [drained])] == [100, 500], "not in the database yet"


def test_other_node_states_are_explained():
    assert "a spare" in explain_node(node(NodeFlag.DRAIN, reason="dalsegno:spare")).sentence
    assert explain_node(node(state=NodeState.DOWN, reason="Not responding")).sentence == (
        "gpu-3 does not answer Slurm: Not responding"
    )
    assert "does not have the hardware" in explain_node(node(NodeFlag.INVALID_REG, reason="gres/gpu count")).sentence
    assert explain_node(node(gpus=8, gpus_used=2, state=NodeState.MIXED)) == Conclusion(
        "gpu-3 is in service (mixed, 2 of 8 GPUs in use)"
    )


# Runs

LOST = {"at": 5.0, "event": "lost", "node": "gpu-2", "why": "silent for 1.2 s", "was": "member"}


def failed(generation: int, rank: int, what: str, noise: bool = False) -> dict[str, object]:
    return {
        "at": 6.0,
        "event": "failed",
        "generation": generation,
        "rank": rank,
        "node": "gpu-1",
        "what": what,
        "noise": noise,
    }


def test_running_run_names_its_last_fault():
    found = explain_run(run(RunPhase.RUNNING, generation=2), [LOST])
    assert found.sentence == ("run train-x is training, in generation 2; last fault: gpu-2 was lost (silent for 1.2 s)")


def test_running_run_names_the_rank_that_it_waits_for_and_asks_about_its_node():
    slow = SlowRank(3, "gpu-2", 1.8)
    evidence = f"{slow.sentence()}; GPU 1: clock 700 MHz (others 1900 MHz)"
    waiting = run(RunPhase.RUNNING, generation=2, slow_rank=slow)
    assert explain_run(waiting, [LOST], slow_rank=evidence) == Conclusion(
        "run train-x is training, in generation 2; last fault: gpu-2 was lost (silent for 1.2 s);"
        " rank 3 on gpu-2 takes 1.8 times as long for a step as the median of all ranks, which wait for it;"
        " GPU 1: clock 700 MHz (others 1900 MHz)",
        "dalsegno why gpu-2",
    )
    nowhere = run(RunPhase.RUNNING, generation=2, slow_rank=replace(slow, node=""))
    assert explain_run(nowhere, [], slow_rank="rank 3 is slow") == Conclusion(
        "run train-x is training, in generation 2; rank 3 is slow", "dalsegno logs -f train-x"
    )
    ended = run(RunPhase.ENDED, exit_code=0, slow_rank=slow)
    assert "rank 3" not in explain_run(ended, [], slow_rank=evidence).sentence


def test_node_that_a_run_left_counts_as_its_last_fault():
    left = {"at": 9.0, "event": "left", "node": "gpu-3", "why": "its file system hangs"}
    found = explain_run(run(RunPhase.RUNNING, generation=3), [LOST, left])
    assert found.sentence.endswith("last fault: it left gpu-3 (its file system hangs)")
    assert list(moments_of_run([left])) == [], "the timeline has a note of it"


def generation(number: int, *nodes: str) -> dict[str, object]:
    return {"at": 6.0 + number, "event": "generation", "generation": number, "nodes": list(nodes)}


def test_each_generation_names_its_own_cause_not_an_older_one():
    """The kernel ran out of memory and killed the parent of a node's workers."""
    killed = {"at": 9.5, "event": "cold", "node": "gpu-1", "why": "its warm parent was killed"}
    entries = [generation(1, "gpu-1", "gpu-2"), LOST, generation(2, "gpu-1"), killed, generation(3, "gpu-1")]
    found = explain_run(run(RunPhase.RUNNING, generation=3), entries)
    assert found.sentence.endswith("last fault: gpu-1: its warm parent was killed, and its workers with it")
    assert [moment.text for moment in moments_of_run(entries)][1::2] == [
        "gpu-2 was lost (silent for 1.2 s)",
        "gpu-1: its warm parent was killed, and its workers with it",
    ]
    grown = explain_run(run(RunPhase.RUNNING, generation=3), [*entries[:3], generation(3, "gpu-1", "gpu-2")])
    assert grown.sentence == "run train-x is training, in generation 3", "an older loss is not the cause"


def test_loss_of_peers_is_named_if_no_other_cause_is_known():
    heard = [generation(1, "gpu-1"), failed(1, 2, "lost its peers", noise=True), failed(1, 3, "the same", noise=True)]
    again = [*heard, generation(2, "gpu-1")]
    assert [moment.text for moment in moments_of_run(again)][1:2] == ["rank 2 on gpu-1 lost its peers"]
    assert explain_run(run(RunPhase.RUNNING, generation=2), again).sentence.endswith(
        "last fault: rank 2 on gpu-1 lost its peers"
    )


def test_failed_run_names_the_first_failed_rank_and_the_repetitions():
    entries = [failed(1, 3, "ValueError: no"), failed(1, 0, "gloo", noise=True), failed(2, 3, "ValueError: no")]
    found = explain_run(run(RunPhase.ENDED, exit_code=1), entries)
    assert found == Conclusion(
        "run train-x ended with code 1: rank 3 on gpu-1 ValueError: no, 2 times in a row",
        "dalsegno logs train-x --rank 3",
    )


def test_other_ends_of_a_run_are_explained():
    assert (
        explain_run(run(RunPhase.ENDED, exit_code=0, generation=3), []).sentence
        == "run train-x is done after 3 generations"
    )
    assert "can be resumed" in explain_run(run(RunPhase.ENDED, exit_code=75), []).sentence
    assert (
        "was cancelled or terminated"
        in explain_run(run(RunPhase.ENDED, exit_code=143, cause=RunCause.CANCELLED), []).sentence
    )
    assert explain_run(run(RunPhase.WAITING, jobs=(7,), message="Resources"), []) == Conclusion(
        "run train-x waits in Slurm's queue (job 7): Resources", "dalsegno why 7"
    )


def test_timeline_of_a_run_omits_entries_without_text():
    entries = [
        {"at": 1.0, "event": "began", "host": "head", "pid": 1},
        {"at": 2.0, "event": "generation", "generation": 1, "nodes": ["gpu-1", "gpu-2"]},
        LOST,
        {"at": 7.0, "event": "note", "text": "it goes on smaller"},
    ]
    assert [moment.text for moment in moments_of_run(entries)] == [
        "generation 1 started on gpu-1, gpu-2",
        "gpu-2 was lost (silent for 1.2 s)",
        "it goes on smaller",
    ]


def test_sources_are_merged_into_one_timeline():
    late, early = Moment(2.0, "run", "b"), Moment(1.0, "slurm", "a")
    assert merge_timelines([late], [early], [late]) == (early, late)


def test_timeline_of_a_node_has_checks_and_actions():
    result = {
        "node": {"phase": "drained", "note": "4 errors"},
        "events": [{"at": 3.0, "text": "drained: gpu-ecc 4 errors"}],
        "checks": [{"at": 2.0, "check": "gpu-ecc", "verdict": "failed", "text": "4 errors"}],
    }
    assert merge_timelines(read_controller_view(result).moments) == (
        Moment(2.0, "check", "gpu-ecc failed: 4 errors"),
        Moment(3.0, "controller", "drained: gpu-ecc 4 errors"),
    )
    assert (read_controller_view(result).phase, read_controller_view(result).note) == (NodePhase.DRAINED, "4 errors")
    assert read_controller_view({}) == ControllerView()
    newer = {"node": {"phase": "of another version"}}
    assert read_controller_view(newer) == ControllerView(NodePhase.UNKNOWN)


def test_node_drained_by_slurm_is_distinguished_from_one_drained_by_a_user():
    drained = node(NodeFlag.DRAIN, reason="Prolog error", reason_user="root")
    assert "was drained by Slurm itself: Prolog error" in explain_node(drained).sentence
    assert (
        "validates it and returns it"
        in explain_node(drained, ControllerView(NodePhase.IN_SERVICE, "job 7 is over")).sentence
    )


def test_slurm_drain_under_the_owners_name_is_recognized():
    drained = node(NodeFlag.DRAIN, reason="Prolog error", reason_user="ada")
    assert "was drained by ada" in explain_node(drained).sentence
    result = explain_node(drained, read_controller_view({"slurm_users": ["ada", "root"]}))
    assert "was drained by Slurm itself: Prolog error" in result.sentence


def test_slurm_drain_that_is_not_repaired_names_the_reason():
    drained = node(NodeFlag.DRAIN, reason="Prolog error", reason_user="root")
    stays = "Slurm has taken it out of service (Prolog error); it stays out: 4 nodes of gpu were taken out in the hour"
    found = explain_node(drained, ControllerView(NodePhase.IN_SERVICE, stays, HeldAction.HOUR))
    assert found.sentence.endswith(f"; {stays}") and found.next == "dalsegno automation resume"
    person = "Slurm has taken it out of service again, 3 times today (Prolog error): an administrator must look at it"
    assert explain_node(
        drained, ControllerView(NodePhase.IN_SERVICE, person, about=Topic.SLURM_DRAIN)
    ).sentence.endswith(f"; {person}")


def test_nodes_of_a_run_are_listed_most_recent_first():
    entries = [
        {"at": 1.0, "event": "generation", "generation": 1, "nodes": ["gpu-1", "gpu-2"]},
        LOST,
        {"at": 7.0, "event": "generation", "generation": 2, "nodes": ["gpu-1", "gpu-3"]},
    ]
    assert nodes_of_run(entries) == ["gpu-1", "gpu-3", "gpu-2"]


def test_nodes_of_a_job_include_lost_ones():
    entries = [
        {"at": 1.0, "event": "granted", "job": 7, "nodes": ["gpu-1", "gpu-2"], "role": "main"},
        LOST,
        {"at": 7.0, "event": "granted", "job": 8, "nodes": ["gpu-3"], "role": "join"},
    ]
    assert (nodes_given(entries, 7), nodes_given(entries, 8)) == (["gpu-1", "gpu-2"], ["gpu-3"])


# Hangs


HANG = HangReport(2, "rank 1 on gpu-3 did not arrive", HangSuspect.CODE, "it is elsewhere", (1,), ("gpu-3",))


def test_hanging_run_names_the_rank_and_who_is_suspected():
    found = explain_run(run(RunPhase.RUNNING, generation=2), [], HANG)
    assert found.sentence == (
        "run train-x hangs: rank 1 on gpu-3 did not arrive; the code is suspected: it is elsewhere"
    )
    assert found.next == "dalsegno doctor train-x"
    by_node = explain_run(run(RunPhase.RUNNING, generation=2), [], replace(HANG, suspect=HangSuspect.NODE))
    assert by_node.next == "dalsegno why gpu-3"


def test_run_that_timed_out_in_a_collective_is_explained_by_its_hang_not_by_its_peers_errors():
    timed_out = {"event": RunEvent.FAILED, "generation": 2, "rank": 0, "node": "gpu-1", "code": -6, "noise": True}
    ended = run(RunPhase.ENDED, generation=2, exit_code=134)
    assert generation_to_explain(ended, [timed_out]) == 2
    assert "did not arrive" in explain_run(ended, [timed_out], HANG).sentence
    own = {**timed_out, "noise": False, "what": "failed: ValueError"}
    assert "ValueError" in explain_run(ended, [own], HANG).sentence, "a failure with a cause of its own counts more"


def test_restart_after_a_hang_names_the_hang_as_its_reason():
    hung = {"event": RunEvent.HUNG, "generation": 1, "at": 1.0, "text": "rank 1 on gpu-3 did not arrive"}
    found = explain_run(run(RunPhase.RUNNING, generation=2), [hung])
    assert found.sentence.endswith("last fault: generation 1 hung: rank 1 on gpu-3 did not arrive")
