"""Queue waits and GPU seconds, over several cycles."""

from __future__ import annotations

from dalsegno.observe.exposition import HistogramFamily, MetricFamily
from dalsegno.observe.slurm_source import MAX_COUNTERS, GpuSeconds, QueueWaits, has_started
from dalsegno.slurm.facts import JobState
from dalsegno.slurm.parse.load import QueuedJob

JOB = QueuedJob(7, "ada", ("train",), JobState.RUNNING, "n1", 8, 2, 1000, 1060, 9000, "", "vision")


def waits(found: QueueWaits) -> dict[str, tuple[int, float]]:
    family = found.family()
    assert isinstance(family, HistogramFamily)
    return {key[0]: (histogram.total, histogram.sum) for key, histogram in family.values.items()}


def seconds(found: GpuSeconds) -> dict[tuple[str, ...], float]:
    family = found.family()
    assert isinstance(family, MetricFamily)
    return dict(family.values)


def test_only_jobs_that_start_while_the_process_runs_count():
    found = QueueWaits()
    found.observe([JOB], ["train", "debug"])
    assert waits(found) == {"train": (0, 0.0), "debug": (0, 0.0)}
    found.observe([JOB, JOB._replace(id=8, started_at=1100)], ["train", "debug"])
    found.observe([JOB, JOB._replace(id=8, started_at=1100)], ["train", "debug"])
    assert waits(found) == {"train": (1, 100.0), "debug": (0, 0.0)}


def test_requeued_job_counts_again():
    found = QueueWaits()
    found.observe([], ["train"])
    found.observe([JOB], ["train"])
    found.observe([JOB._replace(submitted_at=2000, started_at=2005)], ["train"])
    assert waits(found) == {"train": (2, 65.0)}


def test_job_that_was_cancelled_in_the_queue_has_not_started():
    assert has_started(JOB) and has_started(JOB._replace(state=JobState.FAILED))
    assert not has_started(JOB._replace(state=JobState.PENDING))
    assert not has_started(JOB._replace(state=JobState.CANCELLED, nodes=""))


def test_gpu_seconds_grow_by_the_time_between_cycles():
    found = GpuSeconds()
    found.observe([JOB], 2000.0)
    assert seconds(found) == {("ada", "vision"): 0}
    found.observe([JOB], 2015.0)
    assert seconds(found) == {("ada", "vision"): 30}


def test_gpu_seconds_count_from_the_start_to_the_end_of_a_job():
    found = GpuSeconds()
    found.observe([], 1050.0)
    found.observe([JOB], 1070.0)
    assert seconds(found) == {("ada", "vision"): 20}
    ended = JOB._replace(state=JobState.COMPLETED, ends_at=1075)
    found.observe([ended], 1090.0)
    found.observe([ended], 1110.0)
    found.observe([], 1130.0)
    assert seconds(found) == {("ada", "vision"): 30}


def test_gpu_seconds_of_invented_accounts_are_bounded():
    found = GpuSeconds()
    found.observe([JOB._replace(id=at, account=f"a{at}") for at in range(MAX_COUNTERS + 5)], 2000.0)
    assert len(seconds(found)) == MAX_COUNTERS + 1 and ("ada", "(other)") in seconds(found)
