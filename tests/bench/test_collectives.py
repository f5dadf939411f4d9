"""Settings, sizes and test data of the collectives, and the flags of nccl-tests."""

from __future__ import annotations

import math

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.bench.collectives.collectives import (
    DATA_TYPES,
    OPERATIONS,
    PERIOD,
    TESTS,
    CollectiveAsk,
    ElementCounts,
    bandwidths,
    count_elements,
    expected_values,
    instance_id,
    moved_values,
    parse_bytes,
    reduced_values,
    tolerance,
)
from dalsegno.cli.measure.bench import ELSEWHERE
from dalsegno.cli.measure.bench_collectives import COMMANDS, check_others
from dalsegno.errors import UsageError

FLOAT = DATA_TYPES["float"]


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("32M", 32 << 20), ("16G", 16 << 30), ("1k", 1024), ("2KB", 2048)]
)
def test_sizes_are_read_as_nccl_tests_read_them(text: str, size: int):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "5x", "-1", "1.5G", "G"])
def test_other_sizes_are_refused(text: str):
    with pytest.raises(UsageError):
        parse_bytes(text)


def test_sizes_grow_by_a_factor_or_by_a_step():
    assert list(CollectiveAsk("all_reduce", 8, 64, step_factor=2).sizes()) == [8, 16, 32, 64]
    assert list(CollectiveAsk("all_reduce", 8, 40, step_bytes=16).sizes()) == [8, 24, 40]


@pytest.mark.parametrize(
    ("field", "value"),
    [("data_type", "flot"), ("operation", "plus"), ("step_factor", 1), ("max_bytes", 4), ("iters", 0), ("cycles", 0)],
)
def test_settings_that_cannot_work_are_refused(field: str, value: object):
    with pytest.raises(UsageError):
        CollectiveAsk(**{"test": "all_reduce", "min_bytes": 8, "max_bytes": 64, "step_factor": 2, field: value})


def test_settings_survive_json():
    ask = CollectiveAsk("reduce", 8, 1 << 30, step_factor=2, data_type="bfloat16", operation="max", root=3)
    assert CollectiveAsk.from_json(ask.to_json()) == ask


def test_nccl_tests_get_the_same_settings():
    words = CollectiveAsk("all_reduce", 8, 1024, step_factor=4, iters=7).nccl_tests_args()
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        "-b": "8", "-e": "1024", "-f": "4", "-n": "7", "-w": "5", "-N": "1", "-c": "1", "-d": "float", "-o": "sum",
        "-r": "0", "-a": "1",
    }  # fmt: skip


# 100 floats among 3 ranks are 33 each, rounded down to 32: a multiple of 16 bytes, which are 4 floats
@pytest.mark.parametrize(
    ("test", "counts"),
    [
        ("all_reduce", ElementCounts(100, 100, 100, 400)),
        ("broadcast", ElementCounts(100, 100, 100, 400)),
        ("all_gather", ElementCounts(32, 96, 32, 384)),
        ("reduce_scatter", ElementCounts(96, 32, 32, 384)),
        ("alltoall", ElementCounts(96, 96, 32, 384)),
        ("scatter", ElementCounts(96, 32, 32, 384)),
        ("gather", ElementCounts(32, 96, 32, 384)),
    ],
)
def test_elements_are_counted_as_in_nccl_tests(test: str, counts: ElementCounts):
    assert count_elements(TESTS[test], 400, FLOAT, 3) == counts


def test_bandwidths_of_a_published_row():
    # 16 GPUs: 17179869184 bytes in 66132 us are 259.78 GB/s and 487.09 GB/s on the bus
    algbw, busbw = bandwidths(TESTS["all_reduce"], 17179869184, 66132.0, 16)
    assert (round(algbw, 2), round(busbw, 2)) == (259.78, 487.09)


@given(st.integers(1, 40), st.sampled_from(list(DATA_TYPES.values())), st.sampled_from(OPERATIONS))
def test_the_expected_result_is_what_the_ranks_contribute(ranks: int, data_type, operation: str):
    columns = zip(*(reduced_values(rank, ranks, data_type, operation) for rank in range(ranks)), strict=True)
    by_hand = {"sum": sum, "prod": math.prod, "max": max, "min": min, "avg": lambda column: sum(column) / ranks}
    assert expected_values(ranks, data_type, operation) == [by_hand[operation](column) for column in columns]


@given(st.integers(2, 60), st.sampled_from(list(DATA_TYPES.values())), st.sampled_from(["sum", "max", "min", "prod"]))
def test_a_missing_rank_changes_the_result(ranks: int, data_type, operation: str):
    """If a missing rank did not change the result, the check could not detect it."""
    full = expected_values(ranks, data_type, operation)
    if operation in ("sum", "prod"):
        last = reduced_values(ranks - 1, ranks, data_type, operation)
        assert any(value != (0 if operation == "sum" else 1) for value in last)
    assert len(set(full)) > 1 or operation != "sum"
    assert len(full) == PERIOD


@given(st.integers(2, 120), st.sampled_from(list(DATA_TYPES.values())))
def test_sums_of_up_to_120_ranks_are_exact(ranks: int, data_type):
    assert max(map(abs, expected_values(ranks, data_type, "sum"))) <= data_type.exact
    assert tolerance(ranks, data_type, "sum") == 0.0


def test_sums_too_large_for_a_small_float_have_a_tolerance_and_integers_wrap():
    assert tolerance(1000, DATA_TYPES["bfloat16"], "sum") > 0
    assert tolerance(1000, FLOAT, "sum") == 0
    assert all(-128 <= value <= 127 for value in expected_values(500, DATA_TYPES["int8"], "sum"))


def test_data_differs_between_senders_and_receivers():
    assert len({tuple(moved_values(source, target)) for source in range(8) for target in range(8)}) == 64


def test_gloo_cannot_average():
    with pytest.raises(UsageError):
        CollectiveAsk("all_reduce", operation="avg").operations("gloo")
    assert CollectiveAsk("all_reduce", operation="avg").operations("nccl") == ["avg"]
    assert CollectiveAsk("broadcast").operations("gloo") == ["none"]


def test_the_instance_id_is_that_of_the_cloud():
    files = {"/sys/devices/virtual/dmi/id/board_asset_tag": "i-0abc12\n"}
    assert instance_id(lambda path: files.get(path, "")) == "i-0abc12"
    cloud_init = {"/run/cloud-init/instance-data.json": '{"v1": {"instance_id": "ocid1.instance.oc1..x"}}'}
    assert instance_id(lambda path: cloud_init.get(path, "")) == "ocid1.instance.oc1..x"
    assert instance_id(lambda path: "") == ""


# Command line


def test_every_collective_is_a_command():
    assert set(COMMANDS) == set(TESTS) <= set(ELSEWHERE)


def test_flags_that_only_nccl_tests_have_are_kept_for_them_unless_they_say_the_usual():
    assert check_others(["-g", "1", "-G5", "-t", "1", "-R", "1"]) == ["-G", "5", "-R", "1"]


@pytest.mark.parametrize("words", [["--foo"], ["-Q", "1"], ["-G"]])
def test_unknown_flags_are_refused(words: list[str]):
    with pytest.raises(UsageError):
        check_others(words)


@pytest.mark.parametrize(
    "words",
    [
        ["-G", "1", "--nccl-tests", "no"],
        ["--partition", "train"],
        ["--nodes", "2", "--nproc", "2"],
        ["--nodes", "1:2"],
        ["-b", "1M", "-e", "1K"],
        ["--nccl-tests", "/not/there"],
    ],
)
def test_contradictory_options_are_refused_before_anything_runs(words: list[str], monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    asked = CliRunner().invoke(COMMANDS["all_reduce"], words)
    assert isinstance(asked.exception, UsageError)
    assert asked.exception.hint


def refusal(test: str, *words: str) -> UsageError:
    error = CliRunner().invoke(COMMANDS[test], list(words), standalone_mode=False).exception
    assert isinstance(error, UsageError)
    return error


def test_a_flag_that_needs_nccl_tests_is_refused_before_a_job_starts():
    walkthrough = refusal("all_reduce", "-b", "1K", "-e", "1K", "-g", "8", "--nodes", "2")
    assert walkthrough.what == "`-g 8` needs the programs of nccl-tests, which were not found"
    assert "`--gpus-per-node 8`" in walkthrough.hint
    assert "`--nproc 8`" in refusal("all_reduce", "-g", "8").hint
    assert "remove `-G`" in refusal("all_reduce", "-G", "5", "--nodes", "2").hint


def test_sendrecv_needs_two_ranks():
    assert "at least 2 ranks, not 1" in refusal("sendrecv", "-b", "1K", "-e", "1K", "--nproc", "1").what
