"""Why a job waits, a node is out of service, a run has ended: a sentence and the next command."""

from __future__ import annotations

import pytest

from dalsegno.health import Remedy
from dalsegno.recovery.phase import HeldAction, NodePhase
from dalsegno.recovery.reason import Topic
from dalsegno.recovery.repair import Forecast
from dalsegno.runs.status import RunCause, RunPhase, RunStatus
from dalsegno.slurm.facts import JobInfo, JobState, NodeFlag, NodeInfo, NodeState
from dalsegno.slurm.parse.nodes import NodeEvent
from dalsegno.slurm.parse.pending import PendingReason
from dalsegno.why import (
    Care,
    Conclusion,
    Moment,
    explain_job,
    explain_node,
    explain_run,
    in_order,
    moments_of_job,
    moments_of_node,
    moments_of_run,
    nodes_given,
    nodes_of_run,
    read_care,
    within,
)
from dalsegno.why.job import WAITS, why_it_waits
from dalsegno.why.job import aftermath_s as job_aftermath_s
from dalsegno.why.run import aftermath_s as run_aftermath_s

REBOOT, REPLACE = Remedy.REBOOT, Remedy.REPLACE


def job(state: JobState, **what: object) -> JobInfo:
    return JobInfo(7, "train", "ada", state, partition="gpu", **what)  # type: ignore[arg-type]


def node(*flags: NodeFlag, state: NodeState = NodeState.IDLE, reason: str = "", **what: object) -> NodeInfo:
    return NodeInfo("gpu-3", state, frozenset(flags), reason=reason, **what)  # type: ignore[arg-type]


def run(phase: RunPhase, **what: object) -> RunStatus:
    return RunStatus("train-x", "train", "ada", phase, 0.0, 9.0, **what)  # type: ignore[arg-type]


# ---- jobs


def test_a_job_that_waits_for_nodes():
    assert explain_job(job(JobState.PENDING, reason="Resources")) == Conclusion(
        "job 7 waits: it is next in line, and the nodes it needs are busy", "squeue -p gpu --states=RUNNING"
    )


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("QOSMaxJobsPerUserLimit", "its user runs as many jobs as the QOS allows"),
        ("QOSMaxGRESPerUser", "it asks for more than its QOS allows"),
        ("(ReqNodeNotAvail, UnavailableNodes:gpu-3)", "nodes it needs are out of service or reserved"),
        ("DependencyNeverSatisfied", "the job it waits for has not ended as it asked, and never will"),
        ("SomethingNew", "Slurm says `SomethingNew`"),
        ("", "Slurm has not said why yet"),
    ],
)
def test_slurm_s_word_for_it_is_explained(reason: str, word: str):
    assert why_it_waits(reason, "7", "gpu", "ada").sentence == word


def test_every_reason_has_a_sentence_without_holes():
    assert set(PendingReason) - set(WAITS) == {PendingReason.UNKNOWN}
    for reason in WAITS:
        found = why_it_waits(reason.value, "7", "gpu", "ada")
        assert found.sentence and "{" not in found.next


def test_a_job_that_failed_says_how_and_where_to_look():
    failed = job(JobState.FAILED, exit_code=3, stdout="/home/ada/slurm-7.out")
    assert explain_job(failed) == Conclusion(
        "job 7 ended with exit code 3: its program failed", "tail /home/ada/slurm-7.out"
    )
    assert "SIGKILL" in explain_job(job(JobState.FAILED, exit_signal=9)).sentence
    assert "lost a node" in explain_job(job(JobState.NODE_FAIL)).sentence
    assert "time limit" in explain_job(job(JobState.TIMEOUT)).sentence


def test_the_times_of_a_job_that_only_waits_are_not_told_as_if_they_had_been():
    waits = job(JobState.PENDING, submitted_at=10, started_at=99)
    assert list(moments_of_job(waits)) == [Moment(10, "slurm", "job 7 of ada is submitted to gpu")]
    ended = job(JobState.COMPLETED, submitted_at=10, started_at=12, ends_at=30, nodes=("gpu-1", "gpu-2"))
    assert [moment.text for moment in moments_of_job(ended)] == [
        "job 7 of ada is submitted to gpu",
        "job 7 starts on gpu-1, gpu-2",
        "job 7 ends: COMPLETED, exit code 0",
    ]


def test_a_job_of_a_run_says_whose_it_is_and_what_for():
    runs = job(JobState.RUNNING, comment="dalsegno:main")
    assert explain_job(runs, "soak") == Conclusion("job 7 runs; it is the job of run soak", "dalsegno why soak")
    gone = job(JobState.CANCELLED, comment="dalsegno:join")
    assert explain_job(gone, "soak").sentence == (
        "job 7 was cancelled; run soak had asked for it in place of a node it lost"
    )
    assert explain_job(job(JobState.PENDING, reason="Resources"), "soak").next == "squeue -p gpu --states=RUNNING"


def test_a_job_that_waits_says_which_nodes_it_may_not_have():
    waits = job(JobState.PENDING, reason="BadConstraints", excluded=("gpu-3",))
    assert explain_job(waits).sentence.endswith("; nodes are excluded: gpu-3")
    assert explain_job(waits, "soak").sentence.endswith("; run soak keeps it off gpu-3: nodes it is on, or has left")
    assert "gpu-3" not in explain_job(job(JobState.RUNNING, excluded=("gpu-3",))).sentence


def test_what_befell_nodes_after_the_end_belongs_to_what_failed_alone():
    assert job_aftermath_s(job(JobState.NODE_FAIL)) == run_aftermath_s(run(RunPhase.ENDED, exit_code=1)) == 60
    assert job_aftermath_s(job(JobState.COMPLETED)) == 1, "Slurm's times are whole seconds"
    assert {run_aftermath_s(run(RunPhase.ENDED, exit_code=code)) for code in (0, 75, 143)} == {0}
    assert within([Moment(1.0, "a", ""), Moment(2.0, "b", "")], 1.5, 2.0) == [Moment(2.0, "b", "")]


# ---- nodes


def test_a_node_that_we_took_out_says_what_for_and_what_happens():
    drained = node(NodeFlag.DRAIN, reason="dalsegno:reboot:xid[79] GPU 0 has fallen off the bus")
    assert explain_node(drained, Care(NodePhase.REPAIRING)) == Conclusion(
        "gpu-3 is out of service by our own hand: xid 79 (GPU 0 has fallen off the bus); it is being booted anew",
        "dalsegno nodes show gpu-3",
    )


SPENT = "it was rebooted for that 2 times within a day: no more reboots"


@pytest.mark.parametrize(
    ("care", "does"),
    [
        (Care(NodePhase.DRAINED, ahead=Forecast(REBOOT)), "as soon as its jobs have left it, it is booted anew"),
        (Care(NodePhase.DOWN, ahead=Forecast(REPLACE, SPENT)),
         f"as soon as its jobs have left it, another machine takes its place ({SPENT})"),
        (Care(NodePhase.DRAINED, ahead=Forecast(None, SPENT)), f"nothing more is done for it: {SPENT}"),
        (Care(NodePhase.DRAINED, ahead=Forecast(REBOOT, held=HeldAction.OBSERVING)),
         "as soon as its jobs have left it, it would be booted anew, but the controller only observes"),
        (Care(NodePhase.DRAINED, ahead=Forecast(Remedy.DRAIN)),
         "it stays out until that passes again: somebody has to look at it"),
        (Care(NodePhase.REPAIRING), "it is being booted anew"),
        (Care(NodePhase.REPAIRING, tried=REPLACE), "another machine takes its place"),
        (Care(NodePhase.VALIDATING), "it is being validated"),
        (Care(NodePhase.VALIDATING, "paused; would return it to service", HeldAction.PAUSED),
         "paused; would return it to service"),
        (Care(), "no controller says what becomes of it"),
    ],
)  # fmt: skip
def test_what_happens_to_it_is_what_happens_now_and_no_more_is_promised_than_is_let_be(care: Care, does: str):
    drained = node(NodeFlag.DRAIN, reason="dalsegno:reboot:xid[79] GPU 0 has fallen off the bus")
    assert explain_node(drained, care).sentence.endswith(f"; {does}")


def test_what_it_is_out_for_by_now_is_the_controller_s_to_say_and_how_to_see_whether_it_passes():
    down = node(state=NodeState.DOWN, reason="dalsegno:replace:gone neither its agent nor slurmd answers")
    flaps = {"phase": "drained", "reason": "dalsegno:drain:fabric-flaps efa0 went down 3 times within 6 h"}
    assert explain_node(down, read_care({"node": flaps, "ahead": {"how": "drain"}})) == Conclusion(
        "gpu-3 is out of service by our own hand: fabric-flaps (efa0 went down 3 times within 6 h); "
        "it stays out until that passes again: somebody has to look at it",
        "dalsegno health --node gpu-3",
    )


def test_a_node_that_somebody_returned_in_spite_of_its_fault_says_so():
    care = read_care({"node": {"phase": "in service", "excused": ["gpu-temperature"]}})
    assert explain_node(node(), care) == Conclusion(
        "gpu-3 is in service in spite of gpu-temperature: that is left to whoever has returned it",
        "dalsegno health --node gpu-3",
    )


def test_a_node_for_which_nothing_is_done_while_paused_says_how_to_go_on():
    drained = node(NodeFlag.DRAIN, reason="dalsegno:reboot:xid[79] GPU 0 has fallen off the bus")
    ahead = {"how": "reboot", "why": "", "held_back": "paused"}
    found = explain_node(drained, read_care({"node": {"phase": "drained"}, "ahead": ahead}))
    assert found.sentence.endswith("it would be booted anew, but automation is paused")
    assert found.next == "dalsegno automation resume"


def test_a_node_in_service_of_which_something_is_known_is_not_just_in_service():
    spent = "gpu-count 7 of 8 GPUs; left as it is: 4 nodes were taken out; `dalsegno automation resume` allows more"
    assert explain_node(node(), Care(NodePhase.SUSPECTED, spent, HeldAction.HOUR)) == Conclusion(
        f"gpu-3 is in service, and suspected: {spent}", "dalsegno automation resume"
    )
    assert explain_node(node(), Care(NodePhase.SUSPECTED, spent, HeldAction.OUT)).next == "dalsegno health --node gpu-3"
    blind = Care(NodePhase.SUSPECTED, "its agent is dead: its health is not known", about=Topic.AGENT_DEAD)
    assert explain_node(node(), blind).next == "dalsegno up", "which starts it again; it cannot be asked"
    given_up = explain_node(
        node(NodeFlag.DRAIN, reason="dalsegno:drain:disk full"), Care(NodePhase.GIVEN_UP, "3 times")
    )
    assert given_up == Conclusion("gpu-3 was given up: 3 times", "dalsegno nodes show gpu-3")


def test_a_node_that_somebody_else_drained_is_left_alone():
    drained = node(NodeFlag.DRAIN, reason="new RAM", reason_user="bob")
    assert explain_node(drained) == Conclusion(
        "gpu-3 was drained by bob: new RAM; what others drain, we leave alone",
        "scontrol update nodename=gpu-3 state=resume",
    )


def test_nobody_is_told_to_return_a_node_whose_checks_fail():
    lost, well = ({"at": at, "check": "xid", "verdict": verdict, "text": "GPU 0 is off the bus"} for at, verdict in
                  ((1.0, "failed"), (2.0, "passed")))  # fmt: skip
    drained = node(NodeFlag.DRAIN, reason="new RAM", reason_user="bob")
    found = explain_node(drained, read_care({"checks": [lost]}))
    assert found.sentence.endswith("we leave alone. It is not fit for service: xid (GPU 0 is off the bus)")
    assert found.next == "dalsegno health --node gpu-3"
    assert explain_node(drained, read_care({"checks": [lost, well]})) == explain_node(drained)


def test_what_slurm_had_to_say_of_a_node_is_told_also_when_it_is_back():
    drained = NodeEvent("gpu-3", 100, "DRAIN", "bob", "new RAM")
    told = Moment(100, "slurm", "drain: new RAM (bob)")
    assert list(moments_of_node(node(), [drained])) == [told]
    again = node(NodeFlag.DRAIN, reason="new RAM", reason_user="bob", reason_at=101)
    assert list(moments_of_node(again, [drained])) == [told], "the same"
    later = node(NodeFlag.DRAIN, reason="new RAM", reason_user="bob", reason_at=500)
    assert [moment.at for moment in moments_of_node(later, [drained])] == [100, 500], "not in the database yet"


def test_other_states_of_a_node():
    assert "a spare" in explain_node(node(NodeFlag.DRAIN, reason="dalsegno:spare")).sentence
    assert explain_node(node(state=NodeState.DOWN, reason="Not responding")).sentence == (
        "gpu-3 does not answer Slurm: Not responding"
    )
    assert "other hardware" in explain_node(node(NodeFlag.INVALID_REG, reason="gres/gpu count")).sentence
    assert explain_node(node(gpus=8, gpus_used=2, state=NodeState.MIXED)) == Conclusion(
        "gpu-3 is in service (mixed, 2 of 8 GPUs in use)"
    )


# ---- runs

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


def test_a_run_that_goes_on_says_what_hit_it_last():
    found = explain_run(run(RunPhase.RUNNING, generation=2), [LOST])
    assert found.sentence == (
        "run train-x trains, in generation 2; the last thing that hit it: gpu-2 was lost (silent for 1.2 s)"
    )


def test_a_node_that_a_run_left_by_itself_has_hit_it_too():
    left = {"at": 9.0, "event": "left", "node": "gpu-3", "why": "its file system hangs"}
    found = explain_run(run(RunPhase.RUNNING, generation=3), [LOST, left])
    assert found.sentence.endswith("the last thing that hit it: it left gpu-3 (its file system hangs)")
    assert list(moments_of_run([left])) == [], "there is a note of it"


def generation(number: int, *nodes: str) -> dict[str, object]:
    return {"at": 6.0 + number, "event": "generation", "generation": number, "nodes": list(nodes)}


def test_what_ended_each_generation_is_told_and_none_is_blamed_on_an_older_fault():
    """The kernel ran out of memory and took the parent of a node's workers."""
    killed = {"at": 9.5, "event": "cold", "node": "gpu-1", "why": "its warm parent was killed"}
    entries = [generation(1, "gpu-1", "gpu-2"), LOST, generation(2, "gpu-1"), killed, generation(3, "gpu-1")]
    found = explain_run(run(RunPhase.RUNNING, generation=3), entries)
    assert found.sentence.endswith("hit it: gpu-1: its warm parent was killed, and its workers with it")
    assert [moment.text for moment in moments_of_run(entries)][1::2] == [
        "gpu-2 was lost (silent for 1.2 s)",
        "gpu-1: its warm parent was killed, and its workers with it",
    ]
    grown = explain_run(run(RunPhase.RUNNING, generation=3), [*entries[:3], generation(3, "gpu-1", "gpu-2")])
    assert grown.sentence == "run train-x trains, in generation 3", "that it lost one before is no cause of this"


def test_where_only_a_peers_complaint_is_known_that_is_told():
    heard = [generation(1, "gpu-1"), failed(1, 2, "lost its peers", noise=True), failed(1, 3, "the same", noise=True)]
    again = [*heard, generation(2, "gpu-1")]
    assert [moment.text for moment in moments_of_run(again)][1:2] == ["rank 2 on gpu-1 lost its peers"]
    assert explain_run(run(RunPhase.RUNNING, generation=2), again).sentence.endswith(
        "hit it: rank 2 on gpu-1 lost its peers"
    )


def test_a_run_that_its_script_ended_names_the_first_rank_and_how_often():
    entries = [failed(1, 3, "ValueError: no"), failed(1, 0, "gloo", noise=True), failed(2, 3, "ValueError: no")]
    found = explain_run(run(RunPhase.ENDED, exit_code=1), entries)
    assert found == Conclusion(
        "run train-x ended with code 1: rank 3 on gpu-1 ValueError: no, 2 times in a row the same",
        "dalsegno logs train-x --rank 3",
    )


def test_other_ends_of_a_run():
    assert (
        explain_run(run(RunPhase.ENDED, exit_code=0, generation=3), []).sentence
        == "run train-x is done after 3 generations"
    )
    assert "gone on with" in explain_run(run(RunPhase.ENDED, exit_code=75), []).sentence
    assert "from outside" in explain_run(run(RunPhase.ENDED, exit_code=143, cause=RunCause.CANCELLED), []).sentence
    assert explain_run(run(RunPhase.WAITING, jobs=(7,), message="Resources"), []) == Conclusion(
        "run train-x waits in Slurm's queue (job 7): Resources", "dalsegno why 7"
    )


def test_the_timeline_of_a_run_leaves_out_what_tells_nothing():
    entries = [
        {"at": 1.0, "event": "began", "host": "head", "pid": 1},
        {"at": 2.0, "event": "generation", "generation": 1, "nodes": ["gpu-1", "gpu-2"]},
        LOST,
        {"at": 7.0, "event": "note", "text": "it goes on smaller"},
    ]
    assert [moment.text for moment in moments_of_run(entries)] == [
        "generation 1 begins on gpu-1, gpu-2",
        "gpu-2 was lost (silent for 1.2 s)",
        "it goes on smaller",
    ]


def test_what_several_have_noted_is_one_timeline():
    late, early = Moment(2.0, "run", "b"), Moment(1.0, "slurm", "a")
    assert in_order([late], [early], [late]) == (early, late)


def test_what_checks_found_stands_in_the_timeline_of_a_node_beside_what_was_done():
    told = {
        "node": {"phase": "drained", "note": "4 errors"},
        "events": [{"at": 3.0, "text": "drained: gpu-ecc 4 errors"}],
        "checks": [{"at": 2.0, "check": "gpu-ecc", "verdict": "failed", "text": "4 errors"}],
    }
    assert in_order(read_care(told).moments) == (
        Moment(2.0, "check", "gpu-ecc failed: 4 errors"),
        Moment(3.0, "controller", "drained: gpu-ecc 4 errors"),
    )
    assert (read_care(told).phase, read_care(told).note) == (NodePhase.DRAINED, "4 errors")
    assert read_care({}) == Care() and read_care({"node": {"phase": "of another version"}}) == Care(NodePhase.UNKNOWN)


def test_a_node_that_slurm_itself_drained_is_told_from_one_that_a_person_did():
    drained = node(NodeFlag.DRAIN, reason="Prolog error", reason_user="root")
    assert "was taken out of service by Slurm itself: Prolog error" in explain_node(drained).sentence
    assert "validates and returns it" in explain_node(drained, Care(NodePhase.IN_SERVICE, "job 7 is over")).sentence


def test_without_root_slurm_drains_under_its_owner_s_name_and_the_controller_says_so():
    drained = node(NodeFlag.DRAIN, reason="Prolog error", reason_user="ada")
    assert "was drained by ada" in explain_node(drained).sentence
    told = explain_node(drained, read_care({"slurm_users": ["ada", "root"]}))
    assert "was taken out of service by Slurm itself: Prolog error" in told.sentence


def test_a_node_that_slurm_drained_and_we_may_not_take_over_says_why():
    drained = node(NodeFlag.DRAIN, reason="Prolog error", reason_user="root")
    stays = "Slurm has taken it out of service (Prolog error); stays so: 4 nodes of gpu were taken out within the hour"
    found = explain_node(drained, Care(NodePhase.IN_SERVICE, stays, HeldAction.HOUR))
    assert found.sentence.endswith(f"; {stays}") and found.next == "dalsegno automation resume"
    person = "Slurm has taken it out of service again, 3 times today (Prolog error): a person is needed"
    assert explain_node(drained, Care(NodePhase.IN_SERVICE, person, about=Topic.SLURM_DRAIN)).sentence.endswith(
        f"; {person}"
    )


def test_the_nodes_of_a_run_are_those_it_trained_on_the_last_first():
    entries = [
        {"at": 1.0, "event": "generation", "generation": 1, "nodes": ["gpu-1", "gpu-2"]},
        LOST,
        {"at": 7.0, "event": "generation", "generation": 2, "nodes": ["gpu-1", "gpu-3"]},
    ]
    assert nodes_of_run(entries) == ["gpu-1", "gpu-3", "gpu-2"]


def test_the_nodes_of_a_run_s_job_are_those_it_was_given_also_the_lost_ones():
    entries = [
        {"at": 1.0, "event": "granted", "job": 7, "nodes": ["gpu-1", "gpu-2"], "role": "main"},
        LOST,
        {"at": 7.0, "event": "granted", "job": 8, "nodes": ["gpu-3"], "role": "join"},
    ]
    assert (nodes_given(entries, 7), nodes_given(entries, 8)) == (["gpu-1", "gpu-2"], ["gpu-3"])
