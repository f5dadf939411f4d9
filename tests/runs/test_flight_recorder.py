"""Dumps of PyTorch's flight recorder: reading them, and naming the rank that did not arrive."""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
from pathlib import Path

import pytest

from dalsegno.runs.agent.evidence import await_dumps, request_dump
from dalsegno.runs.agent.flight_dump import _is_own_user, own_prefix, read_torch_version, recorder_settings, serve_dumps
from dalsegno.runs.flight_recorder import (
    BadDump,
    CollectiveCall,
    FlightDump,
    ProcessState,
    StallKind,
    find_stall,
    read_dump,
)

RECORDED = Path(__file__).parents[1] / "recorded/doctor"


def call(
    sequence: int, operation: str = "all_reduce", done: bool = True, group: str = "0", **more: object
) -> CollectiveCall:
    return CollectiveCall(group, sequence, operation, done, **more)  # type: ignore[arg-type]


def rank(number: int, *calls: CollectiveCall, **more: object) -> FlightDump:
    return FlightDump(number, calls, **more)  # type: ignore[arg-type]


# Reading


def test_dump_of_an_nccl_timeout_names_the_pending_collective_and_its_line():
    """torch 2.11 wrote the dump on an H200 when NCCL's watchdog ended the process."""
    dump = read_dump((RECORDED / "nccl-timeout/trace_0").read_bytes(), 0)
    (pending,) = dump.pending()
    assert pending.describe() == "all_reduce (1024) at /tmp/w/train.py:21"
    assert (pending.sequence, dump.groups) == (3, {"0": (0,)})


def test_json_of_nccl_and_of_gloo_is_read_alike():
    nccl = read_dump((RECORDED / "nccl-timeout/trace_0.json").read_bytes(), 0)
    gloo = read_dump((RECORDED / "gloo-hang/g0001-flight-0.json").read_bytes(), 0)
    assert [each.sequence for each in nccl.pending()] == [3]
    assert [each.sequence for each in gloo.pending()] == [4]
    assert {each.operation for each in (*nccl.calls, *gloo.calls)} == {"all_reduce"}


def test_last_complete_line_of_json_counts():
    first, last = {"version": "2.10", "entries": []}, {"process": "stopped"}
    lines = f'{json.dumps(first)}\n{json.dumps(last)}\n{{"version": "2'
    assert read_dump(lines.encode(), 3) == FlightDump(3, state=ProcessState.STOPPED)


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("evil"),))


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Evil(), 2),
        pickle.dumps({"entries": [Evil()]}, 4),
        b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00trueR.",
        b"\x80\x02]r\xff\xff\xff\xff.",  # makes the C unpickler reserve 64 GiB
        b"\x80\x02" + b"]" * 100_000 + b".",
        b"[1, 2]",
        b"",
        b"{" * 100_000,
        json.dumps({"some": "json"}).encode(),
        pickle.dumps([1, 2], 2),
    ],
)
def test_anything_but_a_plain_dump_is_refused(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadDump):
        read_dump(data, 0)
    assert not (tmp_path / "evil").exists()


def test_damaged_entries_are_skipped():
    entries = [None, {}, {"profiling_name": 3}, {"profiling_name": "gloo:barrier", "collective_seq_id": 1, "frames": 7}]
    dump = read_dump(json.dumps({"version": 1, "pg_config": [1], "entries": entries}).encode(), 0)
    assert [each.operation for each in dump.calls] == ["barrier"]


# Ranks that wait for other ranks


def test_rank_that_did_not_call_is_missing():
    stall = find_stall([rank(0, call(1), call(2, done=False)), rank(1, call(1)), rank(2, call(1), call(2, done=False))])
    assert stall is not None
    assert (stall.kind, stall.sequence, stall.missing, sorted(stall.calls)) == (StallKind.MISSING, 2, (1,), [0, 2])


def test_rank_without_a_dump_is_missing_if_the_size_of_the_world_is_known():
    stall = find_stall([rank(0, call(1, done=False))], world_size=2)
    assert stall is not None and (stall.kind, stall.missing) == (StallKind.MISSING, (1,))


def test_different_collectives_are_a_mismatch():
    stall = find_stall([rank(0, call(2, done=False)), rank(1, call(2, "broadcast", done=False))])
    assert stall is not None and stall.kind is StallKind.MISMATCH


def test_different_sizes_of_a_reduction_are_a_mismatch_but_not_those_of_a_gather():
    def dumps(operation: str) -> list[FlightDump]:
        return [rank(number, call(2, operation, done=False, sizes=((number + 1,),))) for number in (0, 1)]

    kinds = [stall.kind for name in ("all_reduce", "all_gather") if (stall := find_stall(dumps(name)))]
    assert kinds == [StallKind.MISMATCH, StallKind.INCOMPLETE]


def test_collective_that_all_ranks_called_is_incomplete():
    stall = find_stall([rank(0, call(2, done=False)), rank(1, call(2, done=False))])
    assert stall is not None and (stall.kind, stall.missing) == (StallKind.INCOMPLETE, ())


def test_rank_that_waits_in_another_group_is_not_the_cause():
    """Rank 1 has not arrived in group 0, because it waits for rank 2 in group 7."""
    groups = {"0": (0, 1), "7": (1, 2)}
    stall = find_stall(
        [
            rank(0, call(5, done=False), groups=groups),
            rank(1, call(4), call(9, "broadcast", False, "7"), groups=groups),
            rank(2, call(8, "broadcast", True, "7"), groups=groups),
        ]
    )
    assert stall is not None and (stall.group, stall.missing) == ("7", (2,))


def test_no_stall_without_pending_collectives():
    assert find_stall([rank(0, call(1)), rank(1, call(1), call(2, "send", False, point_to_point=True))]) is None
    assert find_stall([]) is None


# A worker writes its dump when asked


def test_only_the_agents_user_can_ask_for_a_dump():
    def sent_by(uid: int) -> list[tuple[int, int, bytes]]:
        return [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, struct.pack("3i", 7, uid, 7))]

    assert _is_own_user(sent_by(os.getuid())) and _is_own_user(sent_by(0))
    assert not _is_own_user(sent_by(54321)) and not _is_own_user([])


def test_process_without_torch_answers_with_an_empty_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "as the user set it")
    for setting in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(setting, "1")  # `serve_dumps` would otherwise set some of them in this process
    path, name = str(tmp_path / "g0001-flight-3.json"), f"dalsegno.flight.test.{os.getpid()}"
    serve_dumps(name, path)
    request_dump(name)
    await_dumps([(os.getpid(), path, 0)])
    assert read_dump(Path(path).read_bytes(), 3).state is ProcessState.ANSWERED
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == "as the user set it"
    assert own_prefix(path) == str(tmp_path / "g0001-flight-")


FR, NCCL = "TORCH_FR_", "TORCH_NCCL_"
PREFIX, TIMEOUT = "/run/g0001-flight-", {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
NEW = {f"{FR}DUMP_TEMP_FILE": PREFIX, f"{FR}BUFFER_SIZE": "2000"}
OLD = {f"{NCCL}DEBUG_INFO_TEMP_FILE": PREFIX, f"{NCCL}TRACE_BUFFER_SIZE": "2000"}


@pytest.mark.parametrize(
    ("version", "env", "settings"),
    [
        ("2.13.0+cpu", {}, {**NEW, **TIMEOUT}),
        ("2.9.1", {}, {**NEW, **TIMEOUT}),
        ("2.8.0+cu128", {}, {**OLD, **TIMEOUT}),
        ("", {}, {**NEW, **OLD, **TIMEOUT}),
        ("2.4.0", {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}, OLD),
        ("2.4.0", {f"{FR}BUFFER_SIZE": "0", f"{FR}DUMP_TEMP_FILE": "/x"}, TIMEOUT),
        ("2.13.0", {f"{NCCL}TRACE_BUFFER_SIZE": "0"}, {f"{FR}DUMP_TEMP_FILE": PREFIX, **TIMEOUT}),
    ],
)
def test_recorder_is_on_in_every_torch_unless_the_user_set_it(
    version: str, env: dict[str, str], settings: dict[str, str]
):
    assert recorder_settings(PREFIX, version, env) == settings


def test_version_of_torch_is_read_from_its_folder(tmp_path: Path):
    (tmp_path / "version.py").write_text("from typing import Optional\n\n__version__ = '2.4.1+cu121'\n")
    assert (read_torch_version(str(tmp_path)), read_torch_version("/nowhere")) == ("2.4.1+cu121", "")


def test_process_that_does_not_answer_is_recorded_with_its_state(tmp_path: Path):
    path = str(tmp_path / "g0001-flight-3.json")
    await_dumps([(2**22 + 1, path, 0)])
    assert read_dump(Path(path).read_bytes(), 3) == FlightDump(3, state=ProcessState.GONE)


def test_pipe_in_place_of_the_dump_does_not_block_the_agent(tmp_path: Path):
    path = tmp_path / "g0001-flight-3.json"
    os.mkfifo(path)
    await_dumps([(2**22 + 1, str(path), 0)])
    assert path.is_fifo()
