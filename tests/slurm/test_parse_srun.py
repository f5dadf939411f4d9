"""Tests of parsing what salloc and srun print."""

import pytest

from dalsegno.containers.native import NO_CONTAINER
from dalsegno.slurm.parse.srun import (
    SallocAnswer,
    ended_on,
    first_exit_code,
    launch_failures,
    parse_salloc,
    refused_containers,
    started_outside,
    why_not_started,
)

SAID = """srun: cluster configuration lacks support for cpu binding
srun: error: Task launch for StepId=59.0 failed on node train-1: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
srun: error: train-3: task 2: Killed
srun: error: train-2: task 1: Killed
"""
NODES = ("train-1", "train-2", "train-3")


def test_only_the_unreachable_node_is_a_launch_failure():
    assert launch_failures(SAID, 59, NODES) == {"train-1": "Communication connection failure"}


def test_messages_of_older_releases_are_parsed():
    output = "srun: error: Task launch for 59.0 failed on node train-2: Socket timed out on send/recv operation\n"
    assert launch_failures(output, 59, NODES) == {"train-2": "Socket timed out on send/recv operation"}


def test_messages_about_other_jobs_and_nodes_are_ignored():
    assert launch_failures(SAID, 5, NODES) == {}
    assert launch_failures(SAID, 59, NODES[1:]) == {}
    assert launch_failures("srun: error: train-2: task 1: Killed\n", 59, NODES) == {}


ENDED = """srun: error: train-2: task 1: Exited with exit code 9
srun: launch/slurm: _step_signal: Terminating StepId=12.0
slurmstepd-train-1: error: *** STEP 12.0 ON train-1 CANCELLED AT 2026-11-15T11:22:25 ***
srun: error: train-1: task 0: Exited with exit code 143
"""


def test_exit_code_is_that_of_the_first_failed_task():
    assert first_exit_code(ENDED) == 9


def test_one_message_can_name_several_tasks():
    assert first_exit_code("srun: error: train-2: tasks 1-3,5: Exited with exit code 3") == 3


def test_killed_tasks_have_no_exit_code():
    assert first_exit_code("srun: error: train-1: task 0: Terminated") is None


OUTSIDE = """srun: cluster configuration lacks support for cpu binding
/usr/bin/python3: can't open file '/.dalsegno/dalsegno/programs.py': [Errno 2] No such file or directory
srun: error: train-[2-3]: tasks 1-2: Exited with exit code 2
srun: error: train-1: task 0: Killed
"""


def test_agents_outside_their_container_are_detected():
    assert [node for node in NODES if started_outside(OUTSIDE, node)] == ["train-2", "train-3"]
    assert not started_outside(OUTSIDE.replace("/.dalsegno", ""), "train-2")
    assert not started_outside(OUTSIDE.replace("train-[2-3]", "train-[3-2"), "train-2")


REFUSED = """srun: cluster configuration lacks support for cpu binding
dalsegno: train-1: container[125]: image /fsx/a.sqsh: No such file or directory
srun: error: train-1: task 0: Exited with exit code 1
slurmstepd-train-2: error: execve(): python3: No such file or directory
srun: error: train-2: task 1: Exited with exit code 2
"""


def test_refused_containers_have_the_last_reason_per_node():
    later = REFUSED.replace("No such file or directory", "Permission denied", 1)
    assert refused_containers(REFUSED + later) == {"train-1": "image /fsx/a.sqsh: Permission denied"}


@pytest.mark.parametrize("code", ["", f"[{NO_CONTAINER}]"])
def test_plugin_messages_with_and_without_code_are_parsed(code: str):
    said = f"dalsegno: n1: container{code}: /x: No such file or directory\n"
    assert refused_containers(said) == {"n1": "/x: No such file or directory"}


def test_plugin_message_with_another_code_is_not_a_refusal():
    assert refused_containers("dalsegno: n1: container[1]: saved as /x.sqsh\n") == {}


def test_start_failure_is_reported_per_node():
    assert [why_not_started(REFUSED, node) for node in ("train-1", "train-2", "train-3")] == [
        "image /fsx/a.sqsh: No such file or directory",
        "`python3`: No such file or directory",
        "",
    ]


def test_nodes_with_ended_tasks_are_found():
    assert ended_on(SAID) == {"train-2", "train-3"}
    assert ended_on(OUTSIDE) == {"train-1", "train-2", "train-3"}
    assert ended_on("pyxis: importing docker image: nvcr.io/nvidia/pytorch:24.01-py3\n") == set()


def test_pending_and_granted_allocations_have_their_job():
    waiting = "salloc: Pending job allocation 7\nsalloc: job 7 queued and waiting for resources\n"
    assert parse_salloc(waiting) == SallocAnswer(7, False, "job 7 queued and waiting for resources")
    granted = waiting + "salloc: job 7 has been allocated resources\nsalloc: Granted job allocation 7\n"
    assert parse_salloc(granted) == SallocAnswer(7, True, "Granted job allocation 7")


def test_refusal_has_no_prefix_and_no_further_lines():
    text = "salloc: error: Job submit/allocate failed: Invalid qos\nsalloc: Relinquishing job allocation 7\n"
    assert parse_salloc(text) == SallocAnswer(None, False, "Job submit/allocate failed: Invalid qos")


def test_empty_output_gives_no_message():
    assert parse_salloc("") == SallocAnswer() == parse_salloc("bash: salloc: not found\n")
