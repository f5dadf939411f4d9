"""Metrics of Slurm in both dialects and our own: names, labels, counts, zeros and failures."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.observe.collector import Collector
from dalsegno.observe.slurm_compat import SlurmDialect
from dalsegno.observe.slurm_jobs import MAX_ACCOUNTS, MAX_IDLE_PER_USER, OTHER_ACCOUNTS, IdleOwners, JobKey, JobTally
from dalsegno.observe.slurm_source import slurm_sources, slurm_status
from dalsegno.slurm.facts import JobState
from tests.observe.played_slurm import NODE, RECORDED, PlayedSlurm, queue_row, recorded_rows
from tests.observe.text_format import ReadFamily, read_families

VERSIONS = [folder.name.removeprefix("slurm-") for folder in sorted(RECORDED.glob("slurm-*.*"))]
NODES = "alloc comp down drain err fail idle maint mix resv"
QUEUE = "running suspended cancelled completing completed configuring failed timeout preempted node_fail"
OWNED = [f"slurm_{who}_{what}" for who in ("account", "user") for what in
         ("jobs_pending", "jobs_running", "jobs_suspended", "cpus_running")]  # fmt: skip
SCHEDULER = (
    "threads queue_size dbd_queue_size last_cycle mean_cycle cycle_per_minute backfill_last_cycle backfill_mean_cycle "
    "backfill_depth_mean backfilled_jobs_since_start_total backfilled_jobs_since_cycle_total "
    "backfilled_heterogeneous_total"
)
BOTH = {
    *(f"slurm_cpus_{use}" for use in ("alloc", "idle", "other", "total")),
    *(f"slurm_gpus_{use}" for use in ("alloc", "idle", "total", "utilization")),
    *(f"slurm_node_{what}" for what in ("cpu_alloc", "cpu_idle", "cpu_other", "cpu_total", "mem_alloc", "mem_total")),
    *(f"slurm_nodes_{state}" for state in NODES.split()),
    *(f"slurm_partition_cpus_{use}" for use in ("allocated", "idle", "other", "total")),
    "slurm_partition_jobs_pending",
    *(f"slurm_queue_{state}" for state in ("pending", *QUEUE.split())),
    *OWNED,
    *(f"slurm_scheduler_{name}" for name in SCHEDULER.split()),
    "slurm_account_fairshare",
}
NAMES = {
    SlurmDialect.VPENSO: BOTH | {"slurm_queue_pending_dependency"},
    SlurmDialect.SCKYZO: BOTH
    | {"slurm_gpus_other", "slurm_node_status", "slurm_nodes_other", "slurm_nodes_planned", "slurm_nodes_total"}
    | {f"slurm_cores_{state}" for state in ("pending", *QUEUE.split())}
    | {f"slurm_reservation_{what}" for what in
       ("info", "start_time_seconds", "end_time_seconds", "node_count", "core_count")}
    | {f"slurm_{whose}rpc_stats{what}" for whose in ("", "user_") for what in ("", "_avg_time", "_total_time")}
    | {"slurm_info", "slurm_exporter_collector_success", "slurm_exporter_collector_duration_seconds"},
}  # fmt: skip
OURS = {
    "dalsegno_nodes", "dalsegno_jobs", "dalsegno_jobs_pending_reason", "dalsegno_node_state", "dalsegno_node_job",
    "dalsegno_gpus", "dalsegno_user_gpus", "dalsegno_account_gpus", "dalsegno_gpu_seconds_total",
    "slurm_job_queue_wait_seconds", "dalsegno_collector_success", "dalsegno_collector_duration_seconds",
    "dalsegno_collector_last_success_timestamp_seconds", "dalsegno_collector_skipped_rows", "dalsegno_build_info",
}  # fmt: skip


def collected(slurm: PlayedSlurm, dialect: SlurmDialect = SlurmDialect.VPENSO) -> dict[str, ReadFamily]:
    collector = Collector([slurm_sources(slurm.client, dialect)], status=slurm_status(dialect))
    collector.collect()
    return read_families(collector.text())


def recorded(version: str) -> PlayedSlurm:
    return PlayedSlurm(recorded_rows(version, "squeue-load"), recorded_rows(version, "sinfo-load"))


@pytest.mark.parametrize("dialect", SlurmDialect)
def test_names_are_exactly_those_of_the_dialect_and_our_own(dialect):
    assert set(collected(PlayedSlurm(), dialect)) == NAMES[dialect] | OURS


def test_one_squeue_one_sinfo_and_one_sdiag_per_cycle():
    slurm = PlayedSlurm()
    collector = Collector([slurm_sources(slurm.client, SlurmDialect.VPENSO)])
    for _ in range(10):
        collector.collect()
    assert [slurm.asked.count(name) for name in ("squeue", "sinfo", "sdiag")] == [10, 10, 10]
    assert slurm.asked.count("scontrol") == 1, "what changes slowly is asked for in every tenth cycle"


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_cluster_is_counted_as_vpenso_does(version):
    found = collected(recorded(version))
    nodes = {state: found[f"slurm_nodes_{state}"].value() for state in NODES.split()}
    assert {state: nodes[state] for state in ("alloc", "comp", "down", "drain", "maint", "resv", "err", "fail")} == {
        "alloc": 1, "comp": 1, "down": 3, "drain": 3, "maint": 1, "resv": 1, "err": 0, "fail": 0,
    }  # fmt: skip
    assert found["slurm_queue_running"].value() == 8 and found["slurm_queue_pending"].value() == 11
    assert found["slurm_queue_pending_dependency"].value() == 1
    assert found["slurm_queue_node_fail"].value() == found["slurm_queue_timeout"].value() == 1
    assert found["slurm_queue_failed"].value() == found["slurm_queue_cancelled"].value() == 2
    assert found["slurm_gpus_total"].value() == 120
    assert found["slurm_gpus_alloc"].value() == 14
    assert found["slurm_user_cpus_running"].value(user="root") == 58
    assert found["dalsegno_user_gpus"].value(user="root") == 14
    assert found["slurm_partition_cpus_total"].value(partition="debug") == 64


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_cluster_is_counted_as_sckyzo_does(version):
    found = collected(recorded(version), SlurmDialect.SCKYZO)
    assert found["slurm_nodes_alloc"].value(partition="debug", active_feature_set="nvlink,efa") == 1
    assert found["slurm_nodes_total"].value() == 16
    assert found["slurm_queue_pending"].value(user="root", partition="train", reason="Dependency") == 1
    assert found["slurm_cores_running"].value(user="root", partition="train") == 58
    assert found["slurm_node_status"].value(node="n1", status="mixed", partition="debug") == 1
    assert found["slurm_rpc_stats"].value(operation="REQUEST_JOB_INFO") == 185
    assert found["slurm_user_rpc_stats_avg_time"].value(user="root") == 291


def test_pending_job_with_several_partitions_counts_in_each_and_once_in_all():
    row = queue_row(state="PENDING", nodes="", partition="train,debug", reason="Priority")
    found = collected(PlayedSlurm([row]))
    assert found["slurm_queue_pending"].value() == 1
    for partition in ("train", "debug"):
        assert found["slurm_partition_jobs_pending"].value(partition=partition) == 1
        assert found["dalsegno_jobs"].value(partition=partition, state="pending") == 1
        assert found["dalsegno_jobs_pending_reason"].value(partition=partition, reason="Priority") == 1


def test_unknown_states_count_as_other():
    odd = ("n2", "train*", "dynamic_norm*", "dynamic_norm", *NODE[4:])
    found = collected(PlayedSlurm([queue_row(state="LEVITATING")], [NODE, odd]))
    assert found["dalsegno_nodes"].value(partition="train", state="other") == 1
    assert found["dalsegno_jobs"].value(partition="train", state="other") == 1
    assert found["dalsegno_node_state"].value(node="n2", state="other") == 1


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("idle~", "idle"), ("mixed-", "mix"), ("allocated+", "alloc"), ("drained*", "drain"), ("draining@", "drain"),
        ("down$", "down"), ("mixed+drain", "drain"), ("idle+planned", "planned"), ("failing", "fail"),
        ("error", "err"), ("completing", "comp"), ("inval", "other"), ("", "other"),
    ],
)  # fmt: skip
def test_signs_and_compounds_of_node_states_are_understood(word, state):
    found = collected(PlayedSlurm(nodes=[("n1", "train*", word, *NODE[3:])]))
    assert found["dalsegno_node_state"].value(node="n1", state=state) == 1


def test_every_series_is_there_when_the_queue_is_empty():
    found = collected(PlayedSlurm())
    assert found["dalsegno_jobs"].value(partition="train", state="running") == 0
    assert found["dalsegno_jobs_pending_reason"].value(partition="train", reason="Resources") == 0
    assert found["slurm_queue_failed"].value() == 0
    assert found["slurm_partition_jobs_pending"].value(partition="train") == 0
    assert found["dalsegno_gpus"].value(partition="train", state="unavailable") == 0
    assert (
        found["slurm_job_queue_wait_seconds"].samples["slurm_job_queue_wait_seconds_count", (("partition", "train"),)]
        == 0
    )


# Series labelled by a user, an account, a job or a reservation, of which none is known while the queue has always been
# empty
OF_JOBS = {
    *OWNED, "dalsegno_user_gpus", "dalsegno_account_gpus", "dalsegno_gpu_seconds_total", "dalsegno_node_job",
    "slurm_account_fairshare", *(name for name in NAMES[SlurmDialect.SCKYZO] if name.startswith("slurm_reservation_")),
}  # fmt: skip


@pytest.mark.parametrize("dialect", SlurmDialect)
def test_only_series_of_owners_are_absent_when_the_queue_is_empty(dialect):
    found = collected(PlayedSlurm(), dialect)
    assert {name for name, family in found.items() if not family.samples} == OF_JOBS & set(found)


@pytest.mark.parametrize("dialect", SlurmDialect)
def test_series_of_owners_are_zero_when_their_last_job_is_gone(dialect):
    slurm = PlayedSlurm([queue_row()])
    collector = Collector([slurm_sources(slurm.client, dialect)], status=slurm_status(dialect))
    collector.collect()
    busy = read_families(collector.text())
    slurm.queue = ()
    collector.collect()
    idle = read_families(collector.text())
    owned = [*OWNED, "dalsegno_user_gpus", "dalsegno_account_gpus"]
    assert {name: set(idle[name].samples) for name in owned} == {name: set(busy[name].samples) for name in owned}
    assert {value for name in owned for value in idle[name].samples.values()} == {0}
    assert busy["dalsegno_user_gpus"].value(user="ada") == 2 and not idle["dalsegno_node_job"].samples


def test_remembered_owners_are_bounded_and_one_user_cannot_displace_others():
    idle = IdleOwners()
    groups = {JobKey("eve", f"a{at}", ("train",), JobState.RUNNING, ""): JobTally(1, 1, 1) for at in range(5000)}
    idle.added_to(groups)
    idle.added_to({JobKey("ada", "nlp", ("train",), JobState.PENDING, "Priority"): JobTally(1, 1, 0)})
    left = idle.added_to({})
    assert [key.user for key in left].count("eve") == MAX_IDLE_PER_USER
    assert left[JobKey("ada", "nlp", ("train",), JobState.RUNNING, "")] == JobTally(0, 0, 0)


def test_free_gpus_of_a_drained_node_are_unavailable():
    drained = ("n2", "train*", "draining", "mixed+drain", *NODE[4:])
    found = collected(PlayedSlurm(nodes=[NODE, drained]))
    uses = {use: found["dalsegno_gpus"].value(partition="train", state=use) for use in ("alloc", "idle", "unavailable")}
    assert uses == {"alloc": 4, "idle": 6, "unavailable": 6}
    assert found["slurm_gpus_idle"].value() == 12


def test_node_is_joined_with_its_jobs():
    found = collected(PlayedSlurm([queue_row(nodes="n[1-2]"), queue_row(id=8, state="COMPLETED", nodes="n1")]))
    assert set(found["dalsegno_node_job"].samples) == {
        ("dalsegno_node_job", (("node", node), ("job_id", "7"), ("user", "ada"))) for node in ("n1", "n2")
    }


@pytest.mark.parametrize("command", ["sinfo", "squeue", "sdiag"])
def test_failed_command_loses_its_own_series_only(command):
    slurm = PlayedSlurm([queue_row()])
    slurm.broken.add(command)
    found = collected(slurm)
    series = {"sinfo": "dalsegno_nodes", "squeue": "dalsegno_jobs", "sdiag": "slurm_scheduler_threads"}
    assert {name: series[name] in found for name in series} == {name: name != command for name in series}
    assert found["dalsegno_collector_success"].value(source=command) == 0


def test_rows_that_cannot_be_parsed_are_counted():
    found = collected(PlayedSlurm([queue_row(), ("garbage",)], [NODE, ("n2", "train*")]))
    skipped = found["dalsegno_collector_skipped_rows"]
    assert (skipped.value(source="squeue"), skipped.value(source="sinfo")) == (1, 1)


def test_invented_accounts_do_not_make_endless_series():
    found = collected(PlayedSlurm([queue_row(id=at, account=f"a{at}") for at in range(1, MAX_ACCOUNTS + 51)]))
    assert len(found["slurm_account_jobs_running"].samples) == MAX_ACCOUNTS
    assert found["slurm_account_jobs_running"].value(account=OTHER_ACCOUNTS) == 51


HOSTILE = st.text(
    alphabet=st.one_of(st.sampled_from('"\\\n\r{},= #\x1f\x1e\x00\u2028é'), st.characters(codec="utf-8")), max_size=30
)


@given(st.lists(st.tuples(HOSTILE, HOSTILE), min_size=1, max_size=4), st.sampled_from(SlurmDialect))
def test_hostile_account_or_reason_neither_breaks_a_scrape_nor_forges_a_label(texts, dialect):
    rows = [
        queue_row(id=at, state="PENDING", nodes="", reason=reason, account=account)
        for at, (reason, account) in enumerate(texts, 1)
    ]
    found = collected(PlayedSlurm(rows), dialect)
    assert found["dalsegno_collector_success"].value(source="squeue") == 1
    assert {labels for name in found for labels in found[name].labels} == LABELS[dialect]
    assert set(found["slurm_user_jobs_pending"].samples) == {("slurm_user_jobs_pending", (("user", "ada"),))}
    assert found["slurm_user_jobs_pending"].value(user="ada") == len(rows)
    assert found["dalsegno_jobs"].value(partition="train", state="pending") == len(rows)


def label_sets(dialect: SlurmDialect) -> set[tuple[str, ...]]:
    quiet = collected(PlayedSlurm([queue_row(state="PENDING", nodes="")]), dialect)
    return {labels for family in quiet.values() for labels in family.labels}


LABELS = {dialect: label_sets(dialect) for dialect in SlurmDialect}


DASHBOARD_4323 = """
slurm_nodes_alloc slurm_nodes_comp slurm_nodes_down slurm_nodes_drain slurm_nodes_err slurm_nodes_fail slurm_nodes_idle
slurm_nodes_maint slurm_nodes_mix slurm_queue_cancelled slurm_queue_completed slurm_queue_completing slurm_queue_failed
slurm_queue_node_fail slurm_queue_pending slurm_queue_preempted slurm_queue_running slurm_queue_suspended
slurm_queue_timeout slurm_scheduler_threads slurm_scheduler_queue_size slurm_scheduler_last_cycle
slurm_scheduler_mean_cycle slurm_scheduler_backfill_last_cycle slurm_scheduler_backfill_mean_cycle
slurm_scheduler_backfill_depth_mean
"""


def test_dashboard_4323_finds_all_its_metrics_without_labels():
    found = collected(PlayedSlurm())
    queried = DASHBOARD_4323.split()
    assert len(queried) == 26
    assert {name: found[name].labels for name in queried} == {name: {()} for name in queried}


def test_recordings_exist():
    assert VERSIONS and all((Path(RECORDED) / f"slurm-{each}" / "sinfo-load.txt").exists() for each in VERSIONS)
