"""Slurm's answers as facts, from outputs recorded on the real thing (see tests/recorded/slurm-22.05.8/README.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dalsegno.slurm.job_info import JobInfo
from dalsegno.slurm.node_info import NodeInfo
from dalsegno.slurm.parse.accounts import parse_accounts
from dalsegno.slurm.parse.config import parse_config
from dalsegno.slurm.parse.events import NodeEvent, parse_events
from dalsegno.slurm.parse.nodes import parse_nodes
from dalsegno.slurm.parse.ping import ControllerPing, parse_ping
from dalsegno.slurm.parse.sacct import parse_history
from dalsegno.slurm.parse.sdiag import parse_diag
from dalsegno.slurm.parse.sinfo import parse_partitions
from dalsegno.slurm.parse.squeue import jobs_env, parse_excluded, parse_jobs
from dalsegno.slurm.parse.text import PLAIN, Marks, ParseError, duration_s, pairs
from dalsegno.slurm.parse.tres import gpus_in_gres, gpus_in_tres, memory_mib
from dalsegno.slurm.states import JobState, NodeFlag, NodeState, parse_job_state, parse_node_state

RECORDED = Path(__file__).parent.parent / "recorded" / "slurm-22.05.8"


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


def nodes_by_name() -> dict[str, NodeInfo]:
    return {node.name: node for node in parse_nodes(recorded("nodes"))}


def queued(text: str) -> Sequence[JobInfo]:
    return parse_jobs(text, PLAIN).jobs


def history(text: str) -> Sequence[JobInfo]:
    return parse_history(text, (RECORDED / "sacct-texts.txt").read_bytes())


def jobs_by_name(text: str, parse: Callable[[str], Sequence[JobInfo]] = queued) -> dict[str, JobInfo]:
    return {job.name: job for job in parse(text)}


# Nodes


@pytest.mark.parametrize(
    ("name", "state", "flags"),
    [
        ("n1", NodeState.MIXED, set()),
        ("n2", NodeState.ALLOCATED, set()),
        ("n3", NodeState.IDLE, {NodeFlag.DRAIN}),
        ("n4", NodeState.MIXED, {NodeFlag.DRAIN}),
        ("n5", NodeState.DOWN, set()),
        ("n6", NodeState.DOWN, {NodeFlag.NOT_RESPONDING}),
        ("n7", NodeState.IDLE, {NodeFlag.COMPLETING, NodeFlag.PLANNED}),
        ("n8", NodeState.IDLE, {NodeFlag.MAINTENANCE, NodeFlag.RESERVED, NodeFlag.PLANNED}),
        ("n9", NodeState.IDLE, {NodeFlag.PLANNED}),
        ("n12", NodeState.UNKNOWN, {NodeFlag.DRAIN, NodeFlag.INVALID_REG}),
        ("n13", NodeState.UNKNOWN, {NodeFlag.NOT_RESPONDING}),
        ("n14", NodeState.IDLE, {NodeFlag.RESERVED, NodeFlag.PLANNED}),
        ("n15", NodeState.DOWN, set()),
        ("cpu-01", NodeState.IDLE, set()),
    ],
)
def test_a_node_has_a_state_and_flags(name: str, state: NodeState, flags: set[NodeFlag]) -> None:
    node = nodes_by_name()[name]
    assert (node.state, node.flags) == (state, frozenset(flags))


def test_a_node_tells_all_of_itself() -> None:
    node = nodes_by_name()["n1"]
    assert (node.gpus, node.gpus_used, node.gpu_type) == (8, 2, "h100")
    assert (node.cpus, node.memory_mib) == (32, 64000)
    assert (node.address, node.hostname, node.port) == ("127.0.0.1", "vm", 23600)
    assert node.partitions == ("train", "debug") and node.features == ("nvlink", "efa")
    assert node.booted_at and node.slurmd_started_at and node.booted_at < node.slurmd_started_at
    assert node.version == "22.05.8"


def test_a_node_without_gpus_has_none() -> None:
    assert nodes_by_name()["cpu-01"].gpus == nodes_by_name()["cpu-01"].gpus_used == 0


def test_a_reason_may_look_like_a_setting() -> None:
    node = nodes_by_name()["n3"]
    assert node.reason == "dalsegno:replace:xid[79] GPU has fallen off the bus; State=IDLE"
    assert node.reason_user == "root" and node.reason_at is not None


def test_a_reason_from_slurm_conf_is_nobody_s() -> None:
    node = nodes_by_name()["n11"]
    assert (node.reason, node.reason_user, node.reason_at) == ("dalsegno:spare", "", None)


def test_a_node_without_a_reason_has_none() -> None:
    assert nodes_by_name()["n1"].reason == ""


@pytest.mark.parametrize(
    ("name", "in_service", "drained", "draining", "down"),
    [
        ("n1", True, False, False, False),
        ("n3", False, True, True, False),
        ("n4", False, False, True, False),
        ("n5", False, False, False, True),
        ("n8", False, False, False, False),
        ("n13", False, False, False, False),
    ],
)
def test_what_a_node_is_good_for(name: str, in_service: bool, drained: bool, draining: bool, down: bool) -> None:
    node = nodes_by_name()[name]
    assert (node.in_service, node.drained, node.draining, node.down) == (in_service, drained, draining, down)


def test_sinfo_s_own_words_for_states_are_known() -> None:
    for line in recorded("sinfo-words").splitlines():
        for text in line.split()[1:]:
            _, flags = parse_node_state(text)
            assert NodeFlag.UNKNOWN not in flags, text


@pytest.mark.parametrize(
    ("text", "state", "flags"),
    [
        ("IDLE", NodeState.IDLE, set()),
        ("drained*", NodeState.IDLE, {NodeFlag.DRAIN, NodeFlag.NOT_RESPONDING}),
        ("idle~", NodeState.IDLE, {NodeFlag.POWERED_DOWN}),
        ("mixed-", NodeState.MIXED, {NodeFlag.PLANNED}),
        ("ALLOCATED*+DRAIN", NodeState.ALLOCATED, {NodeFlag.NOT_RESPONDING, NodeFlag.DRAIN}),
        ("DOWN+REBOOT_ISSUED", NodeState.DOWN, {NodeFlag.REBOOT_ISSUED}),
        ("reboot^", NodeState.UNKNOWN, {NodeFlag.REBOOT_REQUESTED, NodeFlag.REBOOT_ISSUED}),
        ("IDLE+BRANDNEW", NodeState.IDLE, {NodeFlag.UNKNOWN}),
        ("whatever", NodeState.UNKNOWN, {NodeFlag.UNKNOWN}),
        ("", NodeState.UNKNOWN, {NodeFlag.UNKNOWN}),
    ],
)
def test_unknown_words_are_unknown_and_no_error(text: str, state: NodeState, flags: set[NodeFlag]) -> None:
    assert parse_node_state(text) == (state, frozenset(flags))


# Jobs


@pytest.mark.parametrize(
    ("name", "state", "reason"),
    [
        ("done", JobState.COMPLETED, ""),
        ("fail", JobState.FAILED, "NonZeroExitCode"),
        ("timeout", JobState.TIMEOUT, "TimeLimit"),
        ("cancelled", JobState.CANCELLED, ""),
        ("nodefail", JobState.NODE_FAIL, "NodeDown"),
        ("completing", JobState.COMPLETING, ""),
        ("suspended", JobState.SUSPENDED, ""),
        ("held", JobState.PENDING, "JobHeldUser"),
        ("later", JobState.PENDING, "BeginTime"),
        ("dependent", JobState.PENDING, "Dependency"),
        ("big", JobState.PENDING, "Resources"),
        ("mixed", JobState.RUNNING, ""),
    ],
)
def test_a_job_has_a_state_and_a_reason(name: str, state: JobState, reason: str) -> None:
    job = jobs_by_name(recorded("squeue-all"))[name]
    assert (job.state, job.reason) == (state, reason)


def test_a_running_job_tells_all_of_itself() -> None:
    job = jobs_by_name(recorded("squeue"))["mixed"]
    assert (job.user, job.account, job.qos, job.partition) == ("root", "vision", "high", "train")
    assert (job.nodes, job.node_count, job.cpus, job.gpus, job.memory_mib) == (("n1",), 1, 8, 2, 16000)
    assert job.comment == "a comment | with = signs"
    assert job.time_limit_s == 7200 and job.elapsed_s > 60
    assert job.submitted_at and job.started_at and job.ends_at == job.started_at + 7200
    assert job.priority > 100_000


def test_a_job_tells_its_owner_and_whether_it_has_a_script() -> None:
    job = jobs_by_name(recorded("squeue"))["mixed"]
    assert (job.uid, job.batch, job.preempted_at) == (0, True, None)


def test_a_waiting_job_tells_what_it_asks_for() -> None:
    job = jobs_by_name(recorded("squeue"))["big"]
    assert (job.nodes, job.node_count, job.gpus) == ((), 4, 32)


@pytest.mark.parametrize(("name", "code", "signal"), [("done", 0, 0), ("fail", 3, 0), ("signal", 0, 9)])
def test_how_a_job_ended(name: str, code: int, signal: int) -> None:
    for file, parse in (("squeue-all", queued), ("sacct", history)):
        job = jobs_by_name(recorded(file), parse)[name]
        assert (job.exit_code, job.exit_signal) == (code, signal)


def test_a_job_s_name_may_hold_anything() -> None:
    odd = 'odd name\n"quoted" JobState=RUNNING | é'
    assert jobs_by_name(recorded("squeue"))[odd].state is JobState.PENDING


def test_the_tasks_of_an_array_know_their_array() -> None:
    tasks = [job for job in queued(recorded("squeue")) if job.array_id == 12]
    assert {job.label for job in tasks} == {"12_1", "12_2", "12_[3-6%2]"}


def test_the_parts_of_a_heterogeneous_job_know_their_whole() -> None:
    parts = [job for job in queued(recorded("squeue")) if job.het_id is not None]
    assert sorted((job.label, job.het_id, job.het_offset) for job in parts) == [("13+0", 13, 0), ("13+1", 13, 1)]


def test_a_requeued_job_counts_its_restarts() -> None:
    assert jobs_by_name(recorded("squeue"))["requeued"].restarts == 1


def test_one_job_tells_where_it_runs_and_writes() -> None:
    (job,) = parse_jobs(recorded("squeue-one"), PLAIN, paths=True).jobs
    assert job.stdout == "/dev/null" and job.work_dir.startswith("/")


def test_the_nodes_that_a_job_may_not_have() -> None:
    assert parse_excluded("n[1-2]\x1e\n", PLAIN) == ("n1", "n2")
    assert parse_excluded("\x1e\n", PLAIN) == () == parse_excluded("", PLAIN)


# What users write into their jobs


def answer(marks: Marks, *texts: str) -> str:
    """What squeue writes of jobs 1, 2, 3 … with these names."""
    fields = [word.partition(":")[0] for word in jobs_env(marks)["SQUEUE_FORMAT2"].split(",")]
    usual = {"UserID": "1000", "UserName": "ada", "State": "RUNNING", "NodeList": "n1"}
    jobs = [{**dict.fromkeys(fields, ""), **usual, "JobID": str(id), "Name": name} for id, name in enumerate(texts, 1)]
    return "".join(f"{marks.field.join(job.values())}{marks.record}\n" for job in jobs)


FORGED = answer(PLAIN, "theirs").replace("1000", "0").replace("ada", "root")


@pytest.mark.parametrize(
    "name", ["a\x1eb", "\x1f" * 40, FORGED, f"x\x1e\n{FORGED}", "\x1f\x1e", "line\nend", "\x1b[2Jé\u202e", "0" * 64]
)
def test_a_name_cannot_end_a_field_or_add_a_job(name: str) -> None:
    marks = Marks.fresh()
    queue = parse_jobs(answer(marks, "first", name, "last"), marks)
    assert [job.name for job in queue.jobs] == ["first", name.strip(), "last"]
    assert {(job.uid, job.user) for job in queue.jobs} == {(1000, "ada")} and queue.unreadable == 0


def test_marks_are_drawn_anew_for_each_question() -> None:
    assert len({Marks.fresh() for _ in range(100)}) == 100


def test_a_record_that_cannot_be_read_costs_only_itself() -> None:
    text = answer(PLAIN, "first", "second", "third").replace("2\x1f", "two\x1f", 1)
    queue = parse_jobs(text, PLAIN)
    assert [job.name for job in queue.jobs] == ["first", "third"] and queue.unreadable == 1


def test_a_node_list_that_cannot_be_read_costs_only_its_job() -> None:
    text = answer(PLAIN, "first", "second").replace("n1", "n[1-", 1)
    queue = parse_jobs(text, PLAIN)
    assert [job.name for job in queue.jobs] == ["second"] and queue.unreadable == 1


def test_names_in_the_history_cannot_end_a_record_either() -> None:
    facts = recorded("sacct").split("\x1f\n")[0] + "\x1f\n"
    other = facts.replace(facts.split("\x1f")[0], "77", 1)
    forged = f"x\x1f\n{facts}".replace("root", "ada")
    names = {facts.split("\x1f")[0]: forged, "77": "é" * 600}
    texts = b"".join(_columns(id, name) for id, name in names.items())
    first, second = parse_history(facts + other, texts)
    assert first.name == forged.strip() and first.user == "root"
    assert (second.id, second.name[:3]) == (77, "ééé")


def _columns(id: str, name: str) -> bytes:
    texts = ((id, 24), ("", 64), (name, 1024))
    return b"".join(text.encode()[:width].ljust(width) + b" " for text, width in texts) + b"\n"


def test_when_a_node_was_out_of_service_is_told_by_the_accounting() -> None:
    assert parse_events(recorded("event")) == [
        NodeEvent("train-1", 1794771971, "DRAIN", "root", "new | RAM"),
        NodeEvent("train-2", 1794771973, "DRAIN", "root",
                  "dalsegno:reboot:xid[79] Xid 79 on 0000:41:00: GPU has fallen off the bus."),
    ]  # fmt: skip
    assert parse_events("You are not running a supported accounting_storage plugin\n") == []


def test_history_tells_gpus_and_times() -> None:
    jobs = jobs_by_name(recorded("sacct"), history)
    assert jobs["alloc"].gpus == 8 and jobs["alloc"].nodes == ("n2",)
    assert jobs["timeout"].state is JobState.TIMEOUT and jobs["timeout"].time_limit_s == 60
    assert jobs["cancelled"].state is JobState.CANCELLED
    assert jobs["fail"].started_at and jobs["fail"].ends_at


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("RUNNING", JobState.RUNNING),
        ("COMPLETED,REQUEUED", JobState.COMPLETED),
        ("NEW_ONE", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_job_states_in_all_spellings(text: str, state: JobState) -> None:
    assert parse_job_state(text) is state


# The rest


def test_partitions_know_their_nodes_and_states() -> None:
    train, debug, cpu, empty = parse_partitions(recorded("sinfo"))
    assert train.default and not debug.default
    assert (train.time_limit_s, debug.time_limit_s, cpu.time_limit_s) == (7200, 600, None)
    assert len(train.nodes) == 15 and empty.nodes == {}
    assert train.nodes["n3"] == (NodeState.IDLE, frozenset({NodeFlag.DRAIN}))


def test_the_running_settings() -> None:
    config = parse_config(recorded("config"))
    assert config["ClusterName"] == "lab" and config["ReturnToService"] == "0"
    assert config["SlurmctldHost[0]"] == "vm(127.0.0.1)"


def test_how_the_controller_is_doing() -> None:
    diag = parse_diag(recorded("sdiag"))
    assert diag.at > diag.since > 0
    assert diag.jobs_submitted > 20 and diag.jobs_running > 0
    assert diag.main_cycles > 0 and diag.backfill_cycles > 0 and diag.backfill_last_cycle_us > 0


def test_controllers_that_answer_and_those_that_do_not() -> None:
    assert parse_ping(recorded("ping")) == [ControllerPing("primary", "vm", True)]
    assert parse_ping(recorded("ping-down")) == [ControllerPing("primary", "vm", False)]
    both = "Slurmctld(primary) at a is DOWN\nSlurmctld(backup) at b is UP\n"
    assert [controller.up for controller in parse_ping(both)] == [False, True]


def test_the_accounting_database() -> None:
    found = parse_accounts(recorded("qos"), recorded("assoc"), recorded("user"))
    assert found.qos["high"]["Priority"] == "100"
    assert found.accounts["vision"]["ParentName"] == "root" and found.accounts["vision"]["Fairshare"] == "3"
    assert ("root", "vision") in found.members and found.users["root"]["DefaultAccount"] == "vision"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:55", 55),
        ("10:00", 600),
        ("2:00:00", 7200),
        ("1-02:03:04", 93784),
        ("3-00", 259200),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_durations(text: str, seconds: int | None) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("gpu:8", 8),
        ("gpu:h100:8(S:0-1)", 8),
        ("gpu:a:2(IDX:0,3),gpu:b:1,nic:4", 3),
        ("(null)", 0),
        ("gpu:h100:0(IDX:N/A)", 0),
    ],
)
def test_gpus_in_gres(gres: str, count: int) -> None:
    assert gpus_in_gres(gres) == count


def test_gpus_and_memory_in_tres() -> None:
    assert gpus_in_tres("cpu=8,gres/gpu=2,gres/gpu:h100=2") == 2
    assert gpus_in_tres("gres/gpu:a100=1,gres/gpu:h100=2") == 3
    assert (memory_mib("62.50G"), memory_mib("16000M"), memory_mib("1T"), memory_mib("")) == (64000, 16000, 1048576, 0)


def test_the_first_of_a_key_counts() -> None:
    assert pairs("A=1 B=x y C= A=2") == {"A": "1", "B": "x y", "C": ""}


@pytest.mark.parametrize(
    "parse",
    [
        parse_nodes,
        queued,
        history,
        parse_partitions,
        parse_config,
        parse_diag,
        parse_ping,
    ],
)
def test_something_else_altogether_is_an_error(parse: Callable[[str], object]) -> None:
    with pytest.raises(ParseError, match=r"unexpected|no nodes"):
        parse("bash: command not found\n")
