"""Reading nccl-tests output: versions, prefixes, noise, JSON, broken and hostile input; and writing it again."""

import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.bench.nccl.parse import MAX_TABLES, read_tables
from dalsegno.bench.nccl.render import float_text, render
from dalsegno.bench.nccl.report import MachineAsk, read_reports
from dalsegno.bench.nccl.table import (
    IterationTimes,
    NcclColumns,
    NcclDevice,
    NcclOutputUnreadable,
    NcclRow,
    NcclSettings,
    NcclTable,
    NcclTest,
    NcclTiming,
    average_busbw,
    find_test,
)
from dalsegno.bench.plot import draw, make_curve

RECORDED = Path(__file__).parents[1] / "recorded"
CURRENT = RECORDED / "nccl-tests-2.19.6"
DEVICE = NcclDevice(0, 0, 65234, "gpu49", 0, "0000:0a:00", "NVIDIA H200")


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def only(text: str) -> NcclTable:
    (table,) = read_tables(text)
    return table


# Versions


@pytest.mark.parametrize("name", sorted(path.name for path in CURRENT.glob("*.txt")))
def test_output_of_the_current_version_is_read_and_written_again_without_a_difference(name: str):
    text = (CURRENT / name).read_text()
    assert render(only(text)) == text


def test_all_columns_of_the_current_version_are_read():
    table = only(recorded("nccl-tests-2.19.6/per_iteration_timestamps.txt"))
    assert (table.test, table.version, table.nccl_library) == (NcclTest.ALL_REDUCE, "2.19.6", 22907)
    assert table.settings == NcclSettings(1, 1, 1 << 30, 1 << 31, 2, True, 1, 20)
    assert table.devices == (DEVICE, replace(DEVICE, rank=1, pid=65235, device=1, pci="0000:0b:00"))
    assert table.columns == NcclColumns(per_iteration=True, timestamps=True)
    large, small = table.rows[1], table.rows[2]
    assert (large.size, large.count, large.dtype, large.redop, large.root) == (1 << 31, 1 << 29, "bfloat16", "sum", -1)
    assert large.in_place == NcclTiming(1.2e8, 1251.1, 4470.8, 1.23457e6, IterationTimes(1.1e8, 1.5e8, 1.5e8, 3.5))
    assert (small.dtype, small.redop, small.root, small.timestamp) == ("f8e4m3", "none", 0, "2026-11-18 08:27:12")
    assert small.in_place is not None and small.in_place.wrong is None  # nccl-tests printed N/A
    assert (table.out_of_bounds, table.avg_busbw, table.avg_ok, table.concluded) == (0, 464.075, None, True)


def test_version_2_13_has_no_line_with_the_name_of_the_test():
    table = only(recorded("nccl-tests-2.13/2x-BM.GPU4.8.txt"))
    assert (table.test, table.version, table.listed_ranks) == (NcclTest.UNKNOWN, "", 16)
    assert table.hosts == ("compute-permanent-node-789", "compute-permanent-node-844")
    assert table.rows[0].busbw == 164.07
    assert (table.devices[0].pci, table.devices[0].product) == ("0x0f", "NVIDIA A100-SXM4-40GB")


def test_table_without_in_place_columns_and_without_header_is_read():
    table = only(recorded("nccl-tests-2.13/2x-p5.48xlarge.txt"))
    assert not table.columns.in_place and len(table.rows) == 11
    assert (table.rows[-1].size, table.rows[-1].busbw, table.rows[-1].in_place) == (16 << 30, 487.09, None)


def test_column_error_of_older_versions_is_not_a_number_of_wrong_elements():
    table = only(recorded("nccl-tests-2.11.0/all_reduce.txt"))
    assert [row.busbw for row in table.rows] == [229.49, 231.12]
    assert table.rows[0].wrong == 0 and table.rows[0].timings[0].wrong is None
    assert table.listed_ranks == 8


def test_columns_are_found_by_name_if_older_versions_lack_some():
    row = only(recorded("nccl-tests-2.11.0/all_gather.txt")).rows[0]
    assert (row.redop, row.root, row.dtype, row.busbw) == ("none", -1, "float", 229.38)


def test_version_1_measured_in_milliseconds():
    table = only(recorded("nccl-tests-1.0.0/all_reduce.txt"))
    assert table.rows[0].timings[0].time_us == pytest.approx(627)
    assert (table.rows[0].size, table.listed_ranks, table.out_of_bounds) == (10_000_000, 4, 0)


# Launchers and noise

PREFIXES = {
    "srun -l": "0: ",
    "srun -l with many tasks": "  12: ",
    "mpirun --tag-output": "[1,0]<stdout>:",
    "prterun": "[prterun-head-42@1,3]<stdout>: ",
    "mpirun --timestamp-output": "Wed Nov 18 08:27:12 2026[1,0]<stdout>:",
    "kubectl logs --timestamps": "2026-11-18T08:27:12.123456789Z ",
    "torchrun": "[default0]:",
    "docker compose": "worker-1  | ",
    "a pod and a rank": "2026-11-18T08:27:12Z [1,7]<stdout>:",
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES.keys())
def test_line_prefixes_of_a_launcher_are_removed(prefix: str):
    text = recorded("nccl-tests-2.19.6/all_reduce.txt")
    read = only("".join(f"{prefix}{line}\n" for line in text.splitlines()))
    assert render(read) == text


def test_mixed_tables_of_several_ranks_are_separated_by_their_prefix():
    lines = recorded("nccl-tests-2.19.6/all_reduce.txt").splitlines()
    mixed = "".join(f"{rank}: {line}\n" for line in lines for rank in range(4))
    tables = read_tables(mixed)
    assert [table.stream for table in tables] == ["0", "1", "2", "3"]
    assert all(len(table.rows) == 3 for table in tables)


def test_several_tables_of_a_file_are_read_in_their_order():
    one = recorded("nccl-tests-2.19.6/all_reduce.txt")
    two = one.replace("all_reduce_perf", "all_gather_perf")
    tables = read_tables(f"starting\n{one}\nnext\n{two}{recorded('nccl-tests-2.13/1x-BM.GPU4.8.txt')}")
    assert [table.test for table in tables] == [NcclTest.ALL_REDUCE, NcclTest.ALL_GATHER, NcclTest.UNKNOWN]
    assert [table.line for table in tables] == [2, 24, 44]


def test_lines_of_a_batch_job_around_and_inside_a_table_are_skipped():
    lines = recorded("nccl-tests-2.19.6/all_reduce.txt").splitlines()
    noise = [
        "+ export NCCL_DEBUG=INFO", "gpu49: i-0123456789abcdef0", "#SBATCH --nodes=2", "NCCL version 2.29.7+cuda13.0",
        "gpu49:65234:65300 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read", "0.12 0.99", "8 2",
        "slurmstepd: error: something", "12 tests of 13 float by", "\x1b[31mred\x1b[0m text",
    ]  # fmt: skip
    text = "\n".join(line for each in lines for line in (*noise, each))
    assert [row.size for row in only(text).rows] == [1 << 30, 1 << 31, 1 << 31]


@pytest.mark.parametrize("cuts", [(54,), (63,), (86,), (54, 86), (71, 95)])
def test_row_that_lines_of_nccl_break_is_put_together_again(cuts: tuple[int, ...]):
    lines = recorded("nccl-tests-2.19.6/all_reduce.txt").splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("  1073741824"))
    row, info = lines[at], "gpu49:65234:65300 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P"
    parts = [row[start:end] for start, end in zip((0, *cuts), (*cuts, None), strict=True)]
    broken = [*(f"{part}{info}" for part in parts[:-1]), info, parts[-1]]
    assert only("\n".join([*lines[:at], *broken, *lines[at + 1 :]])).rows == only("\n".join(lines)).rows


def test_rows_without_any_header_are_read():
    rows = "".join(f"{line}\n" for line in recorded("nccl-tests-2.19.6/all_reduce.txt").splitlines()[11:14])
    assert [row.busbw for row in only(rows).rows] == [449.51, 471.22, 0.0]


def test_row_whose_out_of_place_half_is_left_out_has_only_the_other():
    text = recorded("nccl-tests-2.19.6/all_reduce.txt")
    row = next(line for line in text.splitlines() if line.startswith("  1073741824"))
    without = row[:54] + " " * 32 + row[86:]
    assert only(text.replace(row, without)).rows[0].out_of_place is None
    assert only(text.replace(row, without)).rows[0].busbw == 451.03


def test_log_that_is_cut_off_keeps_its_complete_rows():
    text = recorded("nccl-tests-2.19.6/all_reduce.txt")
    cut = text[: text.index("68359.1")]
    table = only(cut)
    assert [row.size for row in table.rows] == [1 << 30]
    assert table.out_of_bounds is None and not table.concluded


def test_footer_shows_wrong_data_and_a_missed_minimum():
    text = (
        recorded("nccl-tests-2.19.6/all_reduce.txt").replace(": 0 OK", ": 7 FAILED").replace(": 464.075 ", ": 4 FAILED")
    )
    table = only(text.rstrip("\n") + "\n# error: unhandled system error\n")
    assert (table.out_of_bounds, table.avg_ok, table.error) == (7, False, "unhandled system error")


@pytest.mark.parametrize(
    ("rank", "line", "error"),
    [
        ("", "train-2: Test CUDA failure util.cu:674 'no CUDA-capable device is detected'", "no CUDA-capable device"),
        ("", "gpu-9: Test NCCL failure common.cu:1010 'unhandled system error / socket'", "unhandled system error"),
        ("3: ", "3gpu: Test NCCL failure common.cu:1010 'remote process exited'", "remote process exited"),
    ],
)
def test_failure_of_a_rank_is_the_error_of_the_table(rank: str, line: str, error: str):
    whole = recorded("nccl-tests-2.19.6/all_reduce.txt").splitlines()
    rows = [at for at, each in enumerate(whole) if each.split()[:1] and each.split()[0].isdecimal()]
    text = "\n".join(f"{'0: ' if rank else ''}{each}" for each in whole[: rows[0] + 1])
    (table,) = read_tables(f"{text}\n{rank}{line}\n .. gpu-9 pid 24: Test failure common.cu:1454\n")
    assert table.error.startswith(error) and len(table.rows) == 1


def test_header_that_lists_one_device_per_process_gives_all_ranks():
    table = only(recorded("nccl-tests-2.19.6/all_reduce.json"))
    assert len(table.devices) == 2 and table.listed_ranks == 16


# JSON


def test_json_of_nccl_tests_is_read_with_its_strings_for_booleans_and_nan():
    table = only(recorded("nccl-tests-2.19.6/all_reduce.json"))
    assert (table.test, table.nccl_library, table.avg_ok, table.concluded) == (NcclTest.ALL_REDUCE, 22907, None, True)
    first, second = table.rows
    assert first.root == -1 and first.in_place is not None and first.in_place.wrong is None
    assert first.out_of_place == NcclTiming(4607.6, 233.04, 436.95, 0.0, IterationTimes(4500, 4900, 4890, 1.74))
    assert second.busbw == 0.0  # nccl-tests printed "nan"
    assert "hunter2" not in repr(table), "the environment may hold secrets"


@pytest.mark.parametrize("share", [0.55, 0.8, 0.95, 0.999])
def test_json_without_its_end_keeps_the_complete_results(share: float):
    text = recorded("nccl-tests-2.19.6/all_reduce.json")
    table = only(text[: int(len(text) * share)])
    assert table.test is NcclTest.ALL_REDUCE and table.listed_ranks == 16
    assert len(table.rows) == (2 if share > 0.9 else 1 if share > 0.7 else len(table.rows))


@pytest.mark.parametrize(
    "text",
    ["{", "{}", '{"config": 1}', '{"config": {}, "results": 3}', '{"a":' * 5000, "[" * 100_000,
     '{"config": {"devices": [1, null]}}', '{"x": ' + "9" * 5000 + "}",
     '{"config": {"ngpus": 1e999, "nthreads": "x"}, "results": [1, {"out_of_place": {"bus_bw": []}}]}'],
)  # fmt: skip
def test_other_json_is_no_table_with_rows(text: str):
    assert [row for table in read_tables(text) for row in table.rows if row.busbw] == []


# Hostile input


@pytest.mark.parametrize(
    "text",
    ["", "\x00" * 1000, "\n" * 1000, "# nThread", "#  Rank  0 Group", "# Out of bounds values : x", "1 2 float",
     "8 2 float sum -1 nan inf -inf 1e999", "# size count type busbw\n8 2 float", "9" * 400, "٣ ٤ float sum -1 1 2 3 0",
     "9" * 400 + " 2 float sum -1 1 2 3 0 1 2 3 0", "8 2 float sum " + "9" * 400 + " 1 2 3 0 1 2 3 0",
     '{"config": {}, "results": [{"size": ' + "9" * 400 + ', "in_place": {"bus_bw": 1e999}}]}',
     "²  2 float sum -1 1 2 3 0 1 2 3 0", "# Avg bus bandwidth : 1e999 OK"],
)  # fmt: skip
def test_broken_lines_are_skipped(text: str):
    tables = read_tables(text)
    assert all(value.busbw < 1e300 for table in tables for row in table.rows for value in row.timings)
    assert all(abs(row.size) < 1 << 64 for table in tables for row in table.rows)
    with suppress(NcclOutputUnreadable):
        for report in read_reports("log", text, MachineAsk(instance="p5.48xlarge")):
            assert json.dumps(report.to_dict(), allow_nan=False)
            assert draw([make_curve(report.table, report.verdict)]).shapes


@given(st.text(alphabet=st.sampled_from("# 0123456789.eE+-:[],<>|\n\r\x00\x1bfloatsumbusbwsizeN/A{}\"'"), max_size=600))
@settings(max_examples=300, deadline=None)
def test_no_text_makes_the_reader_fail(text: str):
    for each in (text, recorded("nccl-tests-2.19.6/all_reduce.txt")[:900] + text):
        with suppress(NcclOutputUnreadable):
            for report in read_reports("log", each):
                assert report.verdict.sentences()


def test_tables_of_a_file_are_limited():
    text = "# nThread 1 nGpus 1 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 1 iters: 1 validation: 1\n"
    assert len(read_tables(text * (MAX_TABLES + 100))) == MAX_TABLES + 1


@pytest.mark.cluster  # the test measures time
@pytest.mark.alone
@pytest.mark.parametrize("kind", ["log", "rows", "ranks", "blanks", "long lines", "half rows", "long names", "quotes"])
def test_ten_megabytes_are_read_and_judged_in_a_second(kind: str):
    table = recorded("nccl-tests-2.13/1x-BM.GPU4.8.txt")
    row = table.splitlines()[15]
    info = "gpu49:65234:65300 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
    text = {
        "log": table + info * (10_000_000 // len(info)),
        "rows": table + f"{row}\n{info * 2}" * (10_000_000 // (len(row) + 1 + 2 * len(info))),
        "ranks": "".join(f"{number % 512}: {line}\n" for number in range(6400) for line in table.splitlines()),
        "blanks": table + "\n" * 10_000_000,
        "long lines": table + f"{'x ' * 100_000}\n" * 50,
        "long names": table + f"NCCL{'a' * 4000}\n" * 2500,
        "quotes": '{"config": {"a": "' + '\\"' * 5_000_000,  # each quote might start a string
        "half rows": table + f"{row[:60]}\n" * (10_000_000 // 61),
    }[kind]

    def measure() -> float:
        started = time.process_time()
        with suppress(NcclOutputUnreadable):
            read_reports("log", text)
        return time.process_time() - started

    assert len(text) >= 9_900_000
    assert any(measure() < 1 for _ in range(3))  # another program may use the core during a measurement


# Writing

COUNTS = st.integers(0, 10**12)
FIGURES = st.floats(0, 1e9, allow_nan=False)
WORDS = st.text("abcdefghijklmnopqrstuvwxyz0123456789-.", min_size=1, max_size=20).filter(
    lambda word: word[0].isalpha()
)


@st.composite
def tables(draw: st.DrawFn) -> NcclTable:
    columns = NcclColumns(draw(st.booleans()), draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))

    def timing() -> NcclTiming:
        spread = IterationTimes(draw(FIGURES), draw(FIGURES), draw(FIGURES), draw(FIGURES))
        wrong = draw(st.none() | COUNTS.map(float))
        return NcclTiming(draw(FIGURES), draw(FIGURES), draw(FIGURES), wrong, spread if columns.per_iteration else None)

    def row() -> NcclRow:
        return NcclRow(
            draw(COUNTS), draw(COUNTS), draw(st.sampled_from(["float", "bfloat16", "f8e5m2", "uint8"])),
            draw(st.sampled_from(["sum", "none", "mulsum"])), draw(st.integers(-1, 10**5)), timing(),
            timing() if columns.in_place else None, "2026-11-18 08:27:12" if columns.timestamps else "",
        )  # fmt: skip

    def device(rank: int) -> NcclDevice:
        return NcclDevice(rank, 0, draw(st.integers(1, 10**7)), draw(WORDS), rank % 8, "0000:0a:00", draw(WORDS))

    rows = tuple(row() for _ in range(draw(st.integers(1, 4))))
    ends = draw(st.booleans())
    return NcclTable(
        test=draw(st.sampled_from([test for test in NcclTest if test is not NcclTest.UNKNOWN])), rows=rows,
        devices=tuple(device(rank) for rank in range(draw(st.integers(1, 3)))),
        settings=NcclSettings(1, draw(st.integers(1, 8)), 8, draw(COUNTS), 2, draw(st.booleans()), 1, 20),
        columns=columns, version="2.19.6", nccl_headers=22907, nccl_library=22907,
        out_of_bounds=draw(st.integers(0, 9)) if ends else None, avg_busbw=average_busbw(rows) if ends else None,
        avg_ok=draw(st.none() | st.booleans()) if ends else None, concluded=ends,
        error=draw(st.sampled_from(["", "unhandled cuda error"])) if ends else "", line=1,
    )  # fmt: skip


@given(tables())
@settings(max_examples=150, deadline=None)
def test_written_table_is_read_again_up_to_the_printed_digits(table: NcclTable):
    text = render(table)
    read = only(text)
    assert render(read) == text
    assert replace(read, rows=(), avg_busbw=None) == replace(table, rows=(), avg_busbw=None)
    for got, want in zip(read.rows, table.rows, strict=True):
        assert replace(got, out_of_place=None, in_place=None) == replace(want, out_of_place=None, in_place=None)
        for one, other in zip(got.timings, want.timings, strict=True):
            assert one.busbw == float(float_text(other.busbw, 6))
            assert (one.wrong is None) == (other.wrong is None)


def test_numbers_lose_decimals_before_they_leave_their_column():
    shown = [float_text(value, 7) for value in (0.004, 9.5, 9999.99, 99999.96, 999999.4, 12345678.0)]
    assert shown == ["   0.00", "   9.50", "9999.99", " 100000", " 999999", "1.2e+07"]
    assert float_text(123456789.0, 6) == " 1e+08"


def test_test_is_named_by_its_program():
    assert find_test("/opt/nccl-tests/build/reduce_scatter_perf") is NcclTest.REDUCE_SCATTER
    assert find_test("train.py") is NcclTest.UNKNOWN
    assert [round(test.bus_factor(4), 2) for test in (NcclTest.ALL_REDUCE, NcclTest.ALLTOALL, NcclTest.REDUCE)] == [
        1.5,
        0.75,
        1.0,
    ]


def test_recorded_json_is_json():
    json.loads(recorded("nccl-tests-2.19.6/all_reduce.json"))
