"""Tests of parsing Slurm's output, recorded from each release by tests/recorded/record.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from dalsegno.slurm.facts import JobInfo, JobState, NodeFlag, NodeInfo, NodeState, parse_job_state, parse_node_state
from dalsegno.slurm.parse.controller import ControllerPing, parse_accounts, parse_config, parse_diag, parse_ping
from dalsegno.slurm.parse.jobs import jobs_env, parse_excluded, parse_history, parse_jobs
from dalsegno.slurm.parse.nodes import NodeEvent, NodeParser, parse_events, parse_nodes, parse_partitions
from dalsegno.slurm.parse.text import (
    PLAIN,
    ParseError,
    Separators,
    duration_s,
    gpus_in_gres,
    gpus_in_tres,
    memory_mib,
    pairs,
)
from dalsegno.slurm.versions import Version

FOLDERS = sorted((Path(__file__).parent.parent / "recorded").glob("slurm-*"))


def queued(text: str) -> Sequence[JobInfo]:
    return parse_jobs(text, PLAIN).jobs


def history(text: str) -> Sequence[JobInfo]:
    return parse_history(text, b"")


@dataclass(frozen=True)
class Recording:
    """The recorded output of one release of Slurm."""

    folder: Path

    @property
    def version(self) -> Version:
        return Version.parse(self.folder.name)

    def text(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def nodes(self) -> dict[str, NodeInfo]:
        return {node.name: node for node in parse_nodes(self.text("nodes"))}

    def queue(self, name: str = "squeue") -> dict[str, JobInfo]:
        return {job.name: job for job in queued(self.text(name))}

    def history(self) -> dict[str, JobInfo]:
        texts = (self.folder / "sacct-texts.txt").read_bytes()
        return {job.name: job for job in parse_history(self.text("sacct"), texts)}


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def slurm(request: pytest.FixtureRequest) -> Recording:
    return Recording(request.param)


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
        ("n7", NodeState.IDLE, {NodeFlag.COMPLETING}),
        ("n8", NodeState.IDLE, {NodeFlag.MAINTENANCE, NodeFlag.RESERVED}),
        ("n9", NodeState.IDLE, set()),
        ("n13", NodeState.UNKNOWN, {NodeFlag.NOT_RESPONDING}),
        ("n14", NodeState.IDLE, {NodeFlag.RESERVED}),
        ("n15", NodeState.DOWN, set()),
    ],
)
def test_a_node_has_a_state_and_flags(slurm: Recording, name: str, state: NodeState, flags: set[NodeFlag]) -> None:
    node = slurm.nodes()[name]  # the scheduler decides which of them are planned for a pending job
    assert (node.state, node.flags - {NodeFlag.PLANNED}) == (state, frozenset(flags))


def test_node_can_be_planned_for_a_job(slurm: Recording) -> None:
    assert any(NodeFlag.PLANNED in node.flags for node in slurm.nodes().values())


def test_node_with_too_few_resources_is_invalid(slurm: Recording) -> None:
    assert slurm.nodes()["n12"].flags == {NodeFlag.DRAIN, NodeFlag.INVALID_REG}


def test_node_of_suspended_job_stays_mixed(slurm: Recording) -> None:
    expected = NodeState.MIXED if slurm.version >= Version(23, 11) else NodeState.IDLE
    assert slurm.nodes()["cpu-01"].state is expected


def test_node_has_all_fields(slurm: Recording) -> None:
    node = slurm.nodes()["n1"]
    assert (node.gpus, node.gpus_used, node.gpu_type) == (8, 2, "h100")
    assert (node.cpus, node.memory_mib) == (32, 64000)
    assert (node.address, node.hostname, node.port) == ("127.0.0.1", "vm", 23600)
    assert node.partitions == ("train", "debug") and node.features == ("nvlink", "efa")
    assert node.booted_at and node.slurmd_started_at and node.booted_at < node.slurmd_started_at
    assert Version.parse(node.version) == slurm.version


def test_node_without_gpus_has_zero_gpus(slurm: Recording) -> None:
    assert slurm.nodes()["cpu-01"].gpus == slurm.nodes()["cpu-01"].gpus_used == 0


def test_reason_can_look_like_a_setting(slurm: Recording) -> None:
    node = slurm.nodes()["n3"]
    assert node.reason == "dalsegno:replace:xid[79] GPU has fallen off the bus; State=IDLE"
    assert node.reason_user == "root" and node.reason_at is not None


def test_reason_from_slurm_conf_has_no_user(slurm: Recording) -> None:
    node = slurm.nodes()["n11"]
    assert (node.reason, node.reason_user, node.reason_at) == ("dalsegno:spare", "", None)


def test_node_without_reason_has_empty_reason(slurm: Recording) -> None:
    assert slurm.nodes()["n1"].reason == ""


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
def test_node_in_service_and_drained_properties(
    slurm: Recording, name: str, in_service: bool, drained: bool, draining: bool, down: bool
) -> None:
    node = slurm.nodes()[name]
    assert (node.in_service, node.drained, node.draining, node.down) == (in_service, drained, draining, down)


def test_sinfo_state_words_are_parsed(slurm: Recording) -> None:
    for line in slurm.text("sinfo-words").splitlines():
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
def test_unknown_state_words_are_unknown(text: str, state: NodeState, flags: set[NodeFlag]) -> None:
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
def test_a_job_has_a_state_and_a_reason(slurm: Recording, name: str, state: JobState, reason: str) -> None:
    job = slurm.queue("squeue-all")[name]
    assert (job.state, job.reason) == (state, reason)


def test_running_job_has_all_fields(slurm: Recording) -> None:
    job = slurm.queue()["mixed"]
    assert (job.user, job.account, job.qos, job.partition) == ("root", "vision", "high", "train")
    assert (job.nodes, job.node_count, job.cpus, job.gpus, job.memory_mib) == (("n1",), 1, 8, 2, 16000)
    assert job.comment == "a comment | with = signs"
    assert job.time_limit_s == 7200 and job.elapsed_s > 60
    assert job.submitted_at and job.started_at and job.ends_at == job.started_at + 7200
    assert job.priority > 100_000


def test_job_has_owner_and_batch_flag(slurm: Recording) -> None:
    job = slurm.queue()["mixed"]
    assert (job.uid, job.batch, job.preempted_at) == (0, True, None)


def test_pending_job_has_requested_resources(slurm: Recording) -> None:
    job = slurm.queue()["big"]
    assert (job.nodes, job.node_count, job.gpus) == ((), 4, 32)


@pytest.mark.parametrize(("name", "code", "signal"), [("done", 0, 0), ("fail", 3, 0), ("signal", 0, 9)])
def test_job_has_exit_code_and_signal(slurm: Recording, name: str, code: int, signal: int) -> None:
    for jobs in (slurm.queue("squeue-all"), slurm.history()):
        assert (jobs[name].exit_code, jobs[name].exit_signal) == (code, signal)


def test_job_name_can_contain_anything(slurm: Recording) -> None:
    odd = 'odd name\n"quoted" JobState=RUNNING | é'
    assert slurm.queue()[odd].state is JobState.PENDING


def test_array_tasks_have_their_array_id(slurm: Recording) -> None:
    tasks = [job for job in queued(slurm.text("squeue")) if job.array_id == 12]
    assert {job.label for job in tasks} == {"12_1", "12_2", "12_[3-6%2]"}


def test_heterogeneous_components_have_their_job_id(slurm: Recording) -> None:
    parts = [job for job in queued(slurm.text("squeue")) if job.het_id is not None]
    assert sorted((job.label, job.het_id, job.het_offset) for job in parts) == [("13+0", 13, 0), ("13+1", 13, 1)]


def test_a_requeued_job_counts_its_restarts(slurm: Recording) -> None:
    assert slurm.queue()["requeued"].restarts == 1


def test_single_job_has_its_paths(slurm: Recording) -> None:
    (job,) = parse_jobs(slurm.text("squeue-one"), PLAIN, paths=True).jobs
    assert job.stdout == "/dev/null" and job.work_dir.startswith("/")


def test_excluded_nodes_are_parsed(slurm: Recording) -> None:
    assert parse_excluded(slurm.text("squeue-excluded"), PLAIN) == ("n1", "n2")
    assert parse_excluded("n[1-2]\x1e\n", PLAIN) == ("n1", "n2")
    assert parse_excluded("\x1e\n", PLAIN) == () == parse_excluded("", PLAIN)


# Text of users


def answer(marks: Separators, *texts: str) -> str:
    """Return the output of squeue for jobs 1, 2, 3 … with these names."""
    fields = [word.partition(":")[0] for word in jobs_env(marks)["SQUEUE_FORMAT2"].split(",")]
    usual = {"UserID": "1000", "UserName": "ada", "State": "RUNNING", "NodeList": "n1"}
    jobs = [{**dict.fromkeys(fields, ""), **usual, "JobID": str(id), "Name": name} for id, name in enumerate(texts, 1)]
    return "".join(f"{marks.field.join(job.values())}{marks.record}\n" for job in jobs)


FORGED = answer(PLAIN, "theirs").replace("1000", "0").replace("ada", "root")


@pytest.mark.parametrize(
    "name", ["a\x1eb", "\x1f" * 40, FORGED, f"x\x1e\n{FORGED}", "\x1f\x1e", "line\nend", "\x1b[2Jé\u202e", "0" * 64]
)
def test_a_name_cannot_end_a_field_or_add_a_job(name: str) -> None:
    marks = Separators.fresh()
    queue = parse_jobs(answer(marks, "first", name, "last"), marks)
    assert [job.name for job in queue.jobs] == ["first", name.strip(), "last"]
    assert {(job.uid, job.user) for job in queue.jobs} == {(1000, "ada")} and queue.unreadable == 0


def test_separators_are_new_for_each_query() -> None:
    assert len({Separators.fresh() for _ in range(100)}) == 100


def test_bad_record_does_not_affect_others() -> None:
    text = answer(PLAIN, "first", "second", "third").replace("2\x1f", "two\x1f", 1)
    queue = parse_jobs(text, PLAIN)
    assert [job.name for job in queue.jobs] == ["first", "third"] and queue.unreadable == 1


def test_bad_node_list_affects_only_its_job() -> None:
    text = answer(PLAIN, "first", "second").replace("n1", "n[1-", 1)
    queue = parse_jobs(text, PLAIN)
    assert [job.name for job in queue.jobs] == ["second"] and queue.unreadable == 1


def test_job_name_cannot_end_a_history_record(slurm: Recording) -> None:
    facts = slurm.text("sacct").split("\x1f\n")[0] + "\x1f\n"
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


def test_node_events_come_from_accounting(slurm: Recording) -> None:
    events = {event.node: event for event in parse_events(slurm.text("event"))}
    assert events["n5"] == NodeEvent("n5", events["n5"].at, "DOWN", "root", "power supply, ticket #123")
    assert events["n3"].reason == "dalsegno:replace:xid[79] GPU has fallen off the bus; State=IDLE"
    assert {events[node].state for node in ("n3", "n11")} == {"DRAIN"}


def test_event_reason_can_contain_the_separator() -> None:
    assert parse_events("|17|||Cluster Registered TRES\ntrain-1|18|DRAIN|root(0)|new | RAM\n") == [
        NodeEvent("train-1", 18, "DRAIN", "root", "new | RAM")
    ]
    assert parse_events("You are not running a supported accounting_storage plugin\n") == []


def test_history_has_gpus_and_times(slurm: Recording) -> None:
    jobs = slurm.history()
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


# Other commands


def test_partitions_have_nodes_and_states(slurm: Recording) -> None:
    train, debug, cpu, empty = parse_partitions(slurm.text("sinfo"))
    assert train.default and not debug.default
    assert (train.time_limit_s, debug.time_limit_s, cpu.time_limit_s) == (7200, 600, None)
    assert len(train.nodes) == 15 and empty.nodes == {}
    assert train.nodes["n3"] == (NodeState.IDLE, frozenset({NodeFlag.DRAIN}))


def test_config_is_parsed(slurm: Recording) -> None:
    config = parse_config(slurm.text("config"))
    assert config["ClusterName"] == "lab" and config["ReturnToService"] == "0"
    assert config["SlurmctldHost[0]"] == "vm(127.0.0.1)"


def test_diagnostics_are_parsed(slurm: Recording) -> None:
    diag = parse_diag(slurm.text("sdiag"))
    assert diag.at > diag.since > 0
    assert diag.jobs_submitted > 20 and diag.jobs_running > 0
    assert diag.main_cycles > 0 and diag.backfill_cycles > 0 and diag.backfill_last_cycle_us > 0


def test_ping_lists_up_and_down_controllers(slurm: Recording) -> None:
    assert parse_ping(slurm.text("ping")) == [ControllerPing("primary", "vm", True)]
    assert parse_ping(slurm.text("ping-down")) == [ControllerPing("primary", "vm", False)]
    both = "Slurmctld(primary) at a is DOWN\nSlurmctld(backup) at b is UP\n"
    assert [controller.up for controller in parse_ping(both)] == [False, True]


def test_accounting_database_is_parsed(slurm: Recording) -> None:
    found = parse_accounts(slurm.text("qos"), slurm.text("assoc"), slurm.text("user"))
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


def test_first_value_of_a_key_counts() -> None:
    assert pairs("A=1 B=x y C= A=2") == {"A": "1", "B": "x y", "C": ""}


def test_node_parser_returns_what_the_last_output_says(slurm: Recording) -> None:
    parser, text = NodeParser(), slurm.text("nodes")
    first = parser.parse(text)
    assert first == parse_nodes(text)
    records = text.splitlines(keepends=True)
    assert list(map(id, parser.parse(text))) == list(map(id, first)), "unchanged records are not parsed again"
    assert parser.parse("".join(records[1:])) == parse_nodes("".join(records[1:])), "a removed node is gone"
    changed = text.replace("State=IDLE", "State=DOWN")
    assert parser.parse(changed) == parse_nodes(changed)


def test_node_parser_ignores_changed_measurements_but_not_such_words_in_a_reason(slurm: Recording) -> None:
    parser, text = NodeParser(), slurm.text("nodes")
    node, *_ = text.splitlines(keepends=True)
    before = parser.parse(node)
    assert parser.parse(re.sub(r" FreeMem=\S+", " FreeMem=1", node))[0] is before[0]
    given = node.rstrip("\n").partition(" Reason=")[0]
    first, second = f"{given} Reason=test FreeMem=1 [root@now]\n", f"{given} Reason=test FreeMem=2 [root@now]\n"
    assert [parser.parse(each)[0].reason for each in (first, second)] == ["test FreeMem=1", "test FreeMem=2"]


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
def test_unexpected_output_is_an_error(parse: Callable[[str], object]) -> None:
    with pytest.raises(ParseError, match=r"unexpected|no nodes"):
        parse("bash: command not found\n")
