"""Tests of the load tests, which compute results that are known in advance."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from dalsegno.health.result import Verdict
from dalsegno.node_agent import loads
from dalsegno.node_agent.loads import (
    available_bytes,
    loopback_exchange,
    matrix_product,
    memory_load,
    product_formula,
    receive_pattern,
    run_load,
    send_pattern,
)


def test_the_formula_equals_the_product():
    for n in (1, 2, 7):
        for i in range(n):
            for j in range(n):
                assert product_formula(i, j, n) == sum((i + k) * (k - j) for k in range(n))


def test_products_are_correct_with_and_without_numpy():
    assert loads._plain_product(20) == 0
    pytest.importorskip("numpy")
    assert loads._numpy_product(200) == 0
    assert matrix_product(0.0).verdict is Verdict.PASSED


def test_a_wrong_product_is_detected():
    answers = iter([0, 0, 3])
    result = loads._repeat(60.0, 10, lambda n: next(answers))
    assert result.verdict is Verdict.FAILED and "3 of 100 numbers" in result.text


def test_at_least_one_product_is_computed():
    assert loads._repeat(0.0, 10, lambda n: 0).text.startswith("1 products")


def test_memory_is_tested_with_a_small_share_of_it():
    began = time.monotonic()
    result = memory_load(100 << 20, 0.05)
    assert result.verdict is Verdict.PASSED and "10 MiB" in result.text and time.monotonic() - began < 30
    assert available_bytes("MemTotal: 5 kB\nMemAvailable:   1024 kB\n") == 1 << 20


def test_a_load_test_that_cannot_run_is_unknown():
    assert run_load(lambda: 1 / 0).verdict is Verdict.UNKNOWN  # type: ignore[arg-type,return-value]


def test_the_loopback_passes():
    assert loopback_exchange(1 << 20).verdict is Verdict.PASSED


def test_changed_bytes_are_detected():
    ours, theirs = socket.socketpair()
    threading.Thread(target=send_pattern, args=(ours, b"one", 3 << 20)).start()
    assert receive_pattern(theirs, b"one", 3 << 20)
    threading.Thread(target=lambda: ours.send(b"x" * 1000)).start()
    assert not receive_pattern(theirs, b"one", 1000)
    ours.close()
    with pytest.raises(OSError, match="broke"):
        receive_pattern(theirs, b"one", 1)
    theirs.close()
