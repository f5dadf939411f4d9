"""Tests of parsing the queue, the nodes, fair shares and reservations for metrics, recorded from each release."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.slurm.facts import JobState
from dalsegno.slurm.parse.controller import parse_diag
from dalsegno.slurm.parse.load import (
    NodeLoad,
    QueuedJob,
    nodes_of_job,
    parse_fair_shares,
    parse_node_loads,
    parse_queue_load,
    parse_reservations,
)
from dalsegno.slurm.parse.text import PLAIN, ParseError, Separators

FOLDERS = sorted((Path(__file__).parent.parent / "recorded").glob("slurm-*.*"))


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def recorded(request):
    return lambda name: (request.param / f"{name}.txt").read_text()


def jobs_by_id(text: str) -> dict[int, QueuedJob]:
    return {job.id: job for job in parse_queue_load(text, PLAIN).jobs}


def test_recorded_queue_is_parsed_in_full(recorded):
    load = parse_queue_load(recorded("squeue-load"), PLAIN)
    assert load.unreadable == 0
    jobs = {job.id: job for job in load.jobs}
    mixed = jobs[5]
    assert (mixed.user, mixed.partitions, mixed.state, mixed.nodes) == ("root", ("train",), JobState.RUNNING, "n1")
    assert (mixed.cpus, mixed.gpus, mixed.account, mixed.reason) == (8, 2, "vision", "")
    assert mixed.submitted_at <= mixed.started_at < mixed.ends_at
    states = [job.state for job in load.jobs]
    assert states.count(JobState.TIMEOUT) == states.count(JobState.NODE_FAIL) == states.count(JobState.SUSPENDED) == 1


def test_tasks_of_an_array_are_jobs_of_their_own(recorded):
    load = parse_queue_load(recorded("squeue-load"), PLAIN)
    assert sum(job.reason == "JobArrayTaskLimit" for job in load.jobs) == 4


def test_pending_job_has_all_its_partitions(recorded):
    several = [job.partitions for job in jobs_by_id(recorded("squeue-load")).values() if len(job.partitions) > 1]
    assert several == [("debug", "train")]


def test_recorded_nodes_have_one_row_per_partition(recorded):
    loads = parse_node_loads(recorded("sinfo-load"))
    assert loads.unreadable == 0
    n1 = [row for row in loads.rows if row.name == "n1"]
    assert sorted(row.partition for row in n1) == ["debug", "train"]
    assert (n1[0].cpus_alloc, n1[0].cpus, n1[0].memory_mib, n1[0].features) == (9, 32, 64000, "nvlink,efa")
    assert (n1[0].gpus, n1[0].gpus_used) == (8, 2)


def test_recorded_nodes_in_service_are_those_that_take_jobs(recorded):
    rows: dict[str, NodeLoad] = {row.name: row for row in parse_node_loads(recorded("sinfo-load")).rows}
    out = {name for name, row in rows.items() if not row.in_service}
    assert out == {"n3", "n4", "n5", "n6", "n8", "n11", "n12", "n13", "n15"}


def test_recorded_fair_shares_are_those_of_accounts(recorded):
    assert set(parse_fair_shares(recorded("sshare"))) == {"root", "vision"}


def test_account_without_a_factor_has_the_mean_of_its_users():
    assert parse_fair_shares("root||\n a||\n  a|x|0.5\n  a|y|1.0\n b||0.25\n  b|x|0.75\n c||\n") == {
        "root": 0.0, "a": 0.75, "b": 0.25, "c": 0.0,
    }  # fmt: skip


def test_recorded_reservations_are_parsed(recorded):
    found = {one.name: one for one in parse_reservations(recorded("reservations"))}
    assert set(found) == {"upgrade", "class"}
    upgrade = found["upgrade"]
    assert (upgrade.active, upgrade.users, upgrade.nodes, upgrade.partition) == (True, "root", "n8", "")
    assert "MAINT" in upgrade.flags and upgrade.ends_at - upgrade.starts_at == 7200
    assert (upgrade.node_count, upgrade.core_count) == (1, 32)
    assert parse_reservations("No reservations in the system\n") == []


def test_sdiag_has_means_backfill_and_calls(recorded):
    diag = parse_diag(recorded("sdiag"))
    assert diag.main_mean_cycle_us > 0 and diag.main_cycles_per_minute > 0 and diag.backfill_mean_cycle_us > 0
    assert (diag.backfill_mean_depth, diag.backfilled_het_components) == (2, 2)
    calls = {one.name: one for one in diag.rpcs_by_type}
    assert calls["REQUEST_PING"].count == 3 and calls["REQUEST_PING"].total_us > 0
    assert [one.name for one in diag.rpcs_by_user] == ["root"]


def test_field_separator_in_an_account_shifts_no_other_field():
    marks = Separators.fresh_record()
    fields = ["7", "ada", "train", "RUNNING", "n1", "8", "cpu=8", "1", "2", "3", "None", "a\x1fb\nc\x1e\n"]
    (job,) = parse_queue_load("\x1f".join(fields) + f"{marks.record}\n", marks).jobs
    assert (job.user, job.state, job.account) == ("ada", JobState.RUNNING, "a�b�c��")


def test_truncated_output_is_refused():
    with pytest.raises(ParseError):
        parse_queue_load("7\x1fada", PLAIN)
    with pytest.raises(ParseError):
        parse_node_loads("n1\x1ftrain\x1e\nn2")


def test_list_of_nodes_is_expanded():
    assert (
        nodes_of_job("n1") == ("n1",) and nodes_of_job("n[1-2],x-1") == ("n1", "n2", "x-1") and nodes_of_job("") == ()
    )
