"""What salloc says."""

from dalsegno.slurm.parse.salloc import SallocAnswer, read_answer


def test_one_that_waits_names_its_job_and_one_that_is_granted_has_it():
    waiting = "salloc: Pending job allocation 7\nsalloc: job 7 queued and waiting for resources\n"
    assert read_answer(waiting) == SallocAnswer(7, False, "job 7 queued and waiting for resources")
    granted = waiting + "salloc: job 7 has been allocated resources\nsalloc: Granted job allocation 7\n"
    assert read_answer(granted) == SallocAnswer(7, True, "Granted job allocation 7")


def test_a_refusal_is_told_without_its_name_and_without_what_follows():
    text = "salloc: error: Job submit/allocate failed: Invalid qos\nsalloc: Relinquishing job allocation 7\n"
    assert read_answer(text) == SallocAnswer(None, False, "Job submit/allocate failed: Invalid qos")


def test_one_that_says_nothing_says_nothing():
    assert read_answer("") == SallocAnswer() == read_answer("bash: salloc: not found\n")
