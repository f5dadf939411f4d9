"""Tests of parsing salloc's output."""

from dalsegno.slurm.parse.salloc import SallocAnswer, read_answer


def test_pending_and_granted_allocations_have_their_job():
    waiting = "salloc: Pending job allocation 7\nsalloc: job 7 queued and waiting for resources\n"
    assert read_answer(waiting) == SallocAnswer(7, False, "job 7 queued and waiting for resources")
    granted = waiting + "salloc: job 7 has been allocated resources\nsalloc: Granted job allocation 7\n"
    assert read_answer(granted) == SallocAnswer(7, True, "Granted job allocation 7")


def test_refusal_has_no_prefix_and_no_further_lines():
    text = "salloc: error: Job submit/allocate failed: Invalid qos\nsalloc: Relinquishing job allocation 7\n"
    assert read_answer(text) == SallocAnswer(None, False, "Job submit/allocate failed: Invalid qos")


def test_empty_output_gives_no_message():
    assert read_answer("") == SallocAnswer() == read_answer("bash: salloc: not found\n")
