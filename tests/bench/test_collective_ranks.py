"""All collectives on two real ranks with gloo, in one pair of processes, because importing torch takes seconds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.bench.collectives.collectives import TESTS, CollectiveAsk
from dalsegno.bench.nccl.parse import read_tables
from dalsegno.bench.nccl.table import NcclTable

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
pytest.importorskip("torch")

SOURCE = Path(__file__).parents[2] / "src"
# In the last test, one element is changed after the collective, as a broken GPU or link would change it.
BROKEN = """
import sys
from dalsegno.bench.collectives import collective_measure as worker

real = worker.place
def place(*arguments, in_place):
    placed = real(*arguments, in_place=in_place)
    def call():
        placed.call()
        placed.received[3] += 1
    return worker.PlacedCall(call, placed.sent, placed.received)

*asks, broken = map(worker.CollectiveAsk.from_json, sys.argv[1:])
rank = worker.CollectiveRank("cpu")
for ask in asks:
    worker.measure(ask, rank, sys.stdout.write)
worker.place = place
found = worker.measure(broken, rank, sys.stdout.write)
rank.leave()
sys.exit(0 if found.out_of_bounds else 1)
"""


@pytest.fixture(scope="module")
def tables() -> tuple[NcclTable, ...]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    asks = [CollectiveAsk(test, 1000, 64_000, step_factor=64, iters=2, warmup_iters=1) for test in TESTS]
    asks.append(CollectiveAsk("reduce_scatter", 4096, 4096, iters=1, data_type="all", operation="all"))
    asks.append(CollectiveAsk("all_reduce", 4096, 4096, iters=1, warmup_iters=0))
    world = {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", BROKEN, *(ask.to_json() for ask in asks)],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    answers = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], answers[0][1][-2000:]
    assert answers[1][0] == "", "only rank 0 prints"
    return read_tables(answers[0][0])


def test_every_collective_prints_the_table_of_nccl_tests(tables: tuple[NcclTable, ...]):
    assert [table.test.value for table in tables[: len(TESTS)]] == list(TESTS)
    for table in tables[: len(TESTS)]:
        assert table.listed_ranks == 2
        assert len(table.rows) == 2
        assert all(timing.time_us > 0 for row in table.rows for timing in row.timings)
        assert (table.out_of_bounds, table.concluded) == (0, True)


def test_data_is_right_and_checked_where_nccl_tests_check_it(tables: tuple[NcclTable, ...]):
    for table in tables[: len(TESTS)]:
        for row in table.rows:
            assert row.out_of_place is not None and row.in_place is not None
            assert row.out_of_place.wrong == 0
            assert row.in_place.wrong == (0 if TESTS[table.test.value].in_place_checked else None)


def test_parts_are_rounded_down_to_16_bytes_as_in_nccl_tests(tables: tuple[NcclTable, ...]):
    by_name = {table.test.value: table.rows[0] for table in tables[: len(TESTS)]}
    assert (by_name["all_reduce"].size, by_name["all_reduce"].count) == (1000, 250)
    assert (by_name["all_gather"].size, by_name["all_gather"].count) == (992, 124)


def test_all_data_types_and_operations_are_right(tables: tuple[NcclTable, ...]):
    rows = tables[len(TESTS)].rows
    assert {row.dtype for row in rows} == {"int8", "uint8", "int32", "int64", "half", "float", "double", "bfloat16"}
    assert {row.redop for row in rows} == {"sum", "prod", "max", "min"}
    assert all(row.wrong == 0 for row in rows)


def test_a_single_wrong_element_on_each_rank_is_counted(tables: tuple[NcclTable, ...]):
    row = tables[-1].rows[0]
    assert row.out_of_place is not None and row.in_place is not None
    assert (row.out_of_place.wrong, row.in_place.wrong) == (2, 2)
    assert tables[-1].out_of_bounds == 1
