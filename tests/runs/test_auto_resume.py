"""Decisions of `srun --auto-resume=1` on a step that ended with a code other than 0."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.runs.auto_resume.decide import (
    DETECTION_S,
    MAX_RESTARTS,
    SETTLE_S,
    Choice,
    LeaveStep,
    RequeueJob,
    StartAgain,
    StepFacts,
    arguments,
    choose,
    environment,
    failures,
    unsettled,
)
from dalsegno.runs.auto_resume.restart import POLL_S, SLURM_TIMEOUT_S, wait_for_choice
from dalsegno.runs.auto_resume.srun_step import SrunStep, read_notes
from dalsegno.slurm.facts import JobInfo, JobState, NodeFlag, NodeInfo, NodeState
from dalsegno.slurm.render import SPARE_REASON
from dalsegno.system.processes import LocalRunner

SRC = Path(__file__).parent.parent.parent / "src"
JOB = JobInfo(7, "train", "ada", JobState.RUNNING, nodes=("n1", "n2", "n3"), batch=True)
WHY = {"n2": "down"}


def seen(job: JobInfo | None = JOB, failed: Mapping[str, str] = WHY, nodes: str = "n1 n2", **more: object) -> StepFacts:
    facts = StepFacts(tuple(nodes.split()), job, failed=failed, bad=failed)
    return replace(facts, **more)  # type: ignore[arg-type]


def in_state(state: JobState, batch: bool = True) -> JobInfo:
    return replace(JOB, state=state, batch=batch)


# Decision


def test_failed_step_on_healthy_nodes_is_left_ended_after_a_grace_period():
    assert choose(seen(failed={}, for_s=DETECTION_S / 2)) is None
    assert choose(seen(failed={}, for_s=DETECTION_S)) == LeaveStep()


def test_step_restarts_in_its_job_when_enough_healthy_nodes_are_left():
    assert choose(seen()) == StartAgain(JOB, without=("n2",))
    shrunk = replace(JOB, nodes=("n1", "n3"))  # --no-kill: Slurm has removed the node from the job
    assert choose(seen(shrunk)) == StartAgain(shrunk)


def test_batch_job_is_requeued_when_healthy_nodes_are_missing():
    assert choose(seen(nodes="n1 n2 n3")) == RequeueJob("job 7 has 2 of the 3 healthy nodes that the step needs")
    left = choose(seen(in_state(JobState.RUNNING, batch=False), nodes="n1 n2 n3"))
    assert isinstance(left, LeaveStep) and "only batch jobs can be requeued" in left.why


def test_decision_waits_until_slurm_has_handled_a_silent_node():
    assert choose(seen(unsettled=("n2",))) is None
    assert choose(seen(unsettled=("n2",), for_s=SETTLE_S)) == StartAgain(JOB, without=("n2",))
    assert choose(seen(in_state(JobState.COMPLETING))) is None


def test_batch_job_that_ended_with_its_node_is_restarted_by_slurm():
    assert choose(seen(in_state(JobState.PENDING))) == LeaveStep("job 7 was requeued", ends=True)
    assert choose(seen(in_state(JobState.NODE_FAIL))) == LeaveStep("job 7 has ended with it")
    alone = in_state(JobState.NODE_FAIL, batch=False)
    assert choose(seen(alone, failed={})) == StartAgain(alone, alone=True)


def test_step_ended_on_purpose_is_not_restarted():
    for state in (JobState.CANCELLED, JobState.TIMEOUT, JobState.PREEMPTED):
        assert choose(seen(in_state(state))) == LeaveStep()
    assert choose(seen(None)) == LeaveStep()


def test_hangup_ends_the_step_unless_salloc_sent_it_after_a_node_failure():
    assert choose(seen(hung_up=True)) == LeaveStep()
    alone = in_state(JobState.NODE_FAIL, batch=False)
    assert choose(seen(alone, hung_up=True)) == StartAgain(alone, alone=True)


def test_restarts_are_limited():
    alone = in_state(JobState.NODE_FAIL, batch=False)
    for facts in (
        seen(times=MAX_RESTARTS),
        seen(alone, times=MAX_RESTARTS),
        seen(nodes="n1 n2 n3", restarts=MAX_RESTARTS),
    ):
        left = choose(facts)
        assert isinstance(left, LeaveStep) and f"{MAX_RESTARTS} times" in left.why


# Waiting


class Clock:
    """A clock that advances only in pauses."""

    def __init__(self) -> None:
        self.now = 100.0

    def pause(self, seconds: float) -> bool:
        self.now += seconds
        return False

    def until_known(self, look: Callable[[float], StepFacts]) -> tuple[Choice, float]:
        choice = wait_for_choice(look, self.pause, lambda: self.now)
        return choice, self.now - 100.0


def test_step_restarts_without_a_silent_node_that_slurm_never_marks_down():
    choice, waited_s = Clock().until_known(lambda for_s: seen(unsettled=("n2",), for_s=for_s))
    assert choice == StartAgain(JOB, without=("n2",)) and SETTLE_S <= waited_s <= SETTLE_S + POLL_S


def test_decision_waits_for_slurm_and_reports_when_it_stays_silent():
    def look(for_s: float, away_s: float) -> StepFacts:
        if for_s < away_s:
            raise DalsegnoError("slurmctld does not answer")
        return seen(for_s=for_s)

    assert Clock().until_known(lambda for_s: look(for_s, SETTLE_S))[0] == StartAgain(JOB, without=("n2",))
    left, waited_s = Clock().until_known(lambda for_s: look(for_s, math.inf))
    assert left == LeaveStep("Slurm does not respond, so the step ends here") and waited_s == SLURM_TIMEOUT_S


def test_request_to_end_is_honoured_in_the_next_pause():
    assert wait_for_choice(lambda for_s: seen(unsettled=("n2",)), lambda seconds: True, lambda: 0.0) == LeaveStep()


# Failed nodes


def node(name: str, *flags: NodeFlag, state: NodeState = NodeState.ALLOCATED, reason: str = "") -> NodeInfo:
    return NodeInfo(name, state, frozenset(flags), "as Slurm says", reason)


def test_failed_nodes_are_down_silent_or_drained_by_the_controller():
    nodes = [
        node("down", state=NodeState.DOWN, reason="Not responding"),
        node("mute", NodeFlag.NOT_RESPONDING),
        node("cut"),
        node("ours", NodeFlag.DRAIN, reason="dalsegno:reboot:xid[79] off the bus"),
        node("theirs", NodeFlag.DRAIN, reason="disk is to be swapped"),
        node("spare", NodeFlag.DRAIN, reason=SPARE_REASON),
        node("reboots", NodeFlag.REBOOT_ISSUED),
        node("fine"),
    ]
    found = failures(nodes, silent=["cut"])
    assert found == {
        "down": "Not responding",
        "mute": "does not answer",
        "cut": "does not answer",
        "ours": "reboot:xid[79] off the bus",
        "reboots": "as Slurm says",
    }
    assert unsettled(nodes, found) == ["mute", "cut", "reboots"]


# Parsing and arguments


def test_plugin_note_names_the_job_and_the_nodes_of_the_step():
    assert read_notes("7 0 gpu-[1-2,4]\n") == SrunStep(7, 0, ("gpu-1", "gpu-2", "gpu-4"))
    for other in ("", "7 0\n", "x 0 n1\n", "7 0 n1\n8 0 n2\n"):
        assert read_notes(other) is None


def test_restart_excludes_failed_nodes_and_a_new_job_has_the_old_shape():
    assert arguments(["srun", "-N2", "a"], StartAgain(JOB, ("n2",))) == ["srun", "--exclude=n2", "-N2", "a"]
    assert arguments(["srun", "a"], StartAgain(JOB)) == ["srun", "a"]
    old = {"SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "HOME": "/"}
    assert environment(old, StartAgain(JOB)) == old
    like = replace(JOB, partition="train", time_limit_s=7200)
    expected = {"SLURM_NNODES": "2", "HOME": "/", "SLURM_PARTITION": "train", "SLURM_TIMELIMIT": "120"}
    assert environment(old, StartAgain(like, alone=True)) == expected
    assert environment({"HOME": "/"}, StartAgain(like, alone=True)) == {"HOME": "/"}


# Start time


def test_program_imports_what_asks_slurm_only_when_it_is_needed():
    heavy = {"asyncio", "json", "dalsegno.slurm", "dalsegno.runs.auto_resume.decide"}
    code = f"import sys, dalsegno.runs.auto_resume.program; print(*sorted({heavy} & set(sys.modules)))"
    done = LocalRunner().run([sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(SRC)})
    assert done.checked().stdout.split() == []
