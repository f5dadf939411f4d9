"""The agent's orders, and the rate limit of copies."""

from __future__ import annotations

import pytest

from dalsegno.train.errors import CheckpointError
from dalsegno.train.keeper.plan import (
    RATE,
    UNKNOWN_STEP,
    CommittedSnapshot,
    Drop,
    Fetch,
    KeeperAddress,
    KeepOrder,
    parse_order,
)
from dalsegno.train.keeper.state import CHUNK, ByteRate, unlimited


def test_each_order_is_parsed() -> None:
    buddy, secret = KeeperAddress("b", 5, "n2"), b"\0\xff"
    keep = {"run": "a", "node": "n1", "secret": "00ff", "buddy": [*buddy], "generation": 3}
    assert parse_order({"keep": keep}) == KeepOrder("a", secret, "n1", 3, buddy, UNKNOWN_STEP, RATE)
    assert parse_order({"keep": {**keep, "buddy": None, "resumed": None}}) == KeepOrder(
        "a", secret, "n1", 3, None, None
    )
    assert parse_order({"keep": {**keep, "resumed": 9, "rate": 5}}) == KeepOrder("a", secret, "n1", 3, buddy, 9, 5.0)
    assert parse_order({"snapshot": {"path": "p", "rank": 0, "step": 1}, "generation": 1}) == CommittedSnapshot()
    fetch = {"number": 1, "rank": 2, "generation": 3, "step": 4, "own": [["a", 1, "n1"], [*buddy]], "shared": []}
    assert parse_order({"fetch": fetch}) == Fetch(1, 2, 3, 4, (KeeperAddress("a", 1, "n1"), buddy), ())
    assert parse_order({"drop": [{"rank": 1}, {"rank": 2}]}) == Drop((1, 2))


def test_unknown_order_is_ignored_and_invalid_order_is_an_error() -> None:
    assert parse_order({"dance": 1}) is None
    with pytest.raises(CheckpointError):
        parse_order({"keep": {"run": "../../etc", "secret": "", "generation": 1}})
    with pytest.raises(KeyError):
        parse_order({"fetch": {}})


def test_rate_is_kept_after_a_short_burst() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    pace = ByteRate(1000.0, clock=lambda: now[0], sleep=sleep)
    for _ in range(100):
        pace.take(100)
    assert now[0] == pytest.approx((100 * 100 - 250) / 1000)
    now[0] += 60  # unused tokens do not accumulate
    began = now[0]
    for _ in range(10):
        pace.take(100)
    assert now[0] - began == pytest.approx(0.75)


def test_low_rate_uses_small_pieces() -> None:
    assert ByteRate(1e6).chunk == 125_000 and ByteRate(1.0).chunk == 64 << 10 and unlimited().chunk == CHUNK
