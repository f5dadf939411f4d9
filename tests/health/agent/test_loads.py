"""Loads that a node must bear, and answers that are known."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from dalsegno.health.agent import loads, pair
from dalsegno.health.agent.loads import (
    available_bytes,
    judged,
    loopback_exchange,
    matrix_product,
    memory_load,
    product_formula,
    receive_pattern,
    send_pattern,
)
from dalsegno.health.result import Result, Verdict
from dalsegno.train.frames import pack


def test_the_formula_is_the_product():
    for n in (1, 2, 7):
        for i in range(n):
            for j in range(n):
                assert product_formula(i, j, n) == sum((i + k) * (k - j) for k in range(n))


def test_products_are_right_with_and_without_a_library():
    assert loads._plain_product(20) == 0
    pytest.importorskip("numpy")
    assert loads._numpy_product(200) == 0
    assert matrix_product(0.0).verdict is Verdict.PASSED


def test_a_wrong_product_is_found():
    answers = iter([0, 0, 3])
    result = loads._repeat(60.0, 10, lambda n: next(answers))
    assert result.verdict is Verdict.FAILED and "3 of 100 numbers" in result.text


def test_a_product_is_made_once_however_little_time_there_is():
    assert loads._repeat(0.0, 10, lambda n: 0).text.startswith("1 products")


def test_memory_gives_back_what_it_was_given_and_little_is_taken():
    began = time.monotonic()
    result = memory_load(100 << 20, 0.05)
    assert result.verdict is Verdict.PASSED and "10 MiB" in result.text and time.monotonic() - began < 30
    assert available_bytes("MemTotal: 5 kB\nMemAvailable:   1024 kB\n") == 1 << 20


def test_a_load_that_cannot_be_put_on_a_node_is_unknown():
    assert judged(lambda: 1 / 0).verdict is Verdict.UNKNOWN  # type: ignore[arg-type,return-value]


def test_bytes_come_through_the_loopback():
    assert loopback_exchange(1 << 20).verdict is Verdict.PASSED


def test_other_bytes_than_were_sent_are_noticed():
    ours, theirs = socket.socketpair()
    threading.Thread(target=send_pattern, args=(ours, b"one", 3 << 20)).start()
    assert receive_pattern(theirs, b"one", 3 << 20)
    threading.Thread(target=lambda: ours.send(b"x" * 1000)).start()
    assert not receive_pattern(theirs, b"one", 1000)
    ours.close()
    with pytest.raises(OSError, match="broke"):
        receive_pattern(theirs, b"one", 1)
    theirs.close()


# Two nodes


def paired(secret: bytes, other: bytes, least: float = 0.0) -> tuple[Result, Result]:
    ports: list[int] = []
    ready = threading.Event()
    results: list[Result] = []

    def listens(port: int) -> None:
        ports.append(port)
        ready.set()

    thread = threading.Thread(target=lambda: results.append(pair.listen("127.0.0.1", secret, listens, least)))
    thread.start()
    assert ready.wait(60)
    stranger = socket.create_connection(("127.0.0.1", ports[0]))
    stranger.sendall(pack({"nonce": "x"}))
    dialled = pair.dial("127.0.0.1", ports[0], other, least)
    if other != secret:
        pair.dial("127.0.0.1", ports[0], secret)
    thread.join(60)
    stranger.close()
    return results[0], dialled


def test_two_nodes_exchange_data_though_a_stranger_calls_first():
    listened, dialled = paired(b"once", b"once")
    assert (listened.verdict, dialled.verdict) == (Verdict.PASSED, Verdict.PASSED)
    assert "32 MiB each way" in dialled.text


def test_who_does_not_know_the_secret_of_the_test_is_no_partner():
    listened, dialled = paired(b"once", b"other")
    assert dialled.verdict is Verdict.FAILED and dialled.code == "stranger"
    assert listened.verdict is Verdict.PASSED, "the right one came afterwards"


def test_a_link_that_is_too_slow_fails_on_both_sides():
    listened, dialled = paired(b"once", b"once", least=1e9)
    assert {listened.code, dialled.code} == {"slow"}


def test_a_node_that_cannot_be_reached_is_told():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert pair.dial("127.0.0.1", port, b"once").code == "unreachable"
