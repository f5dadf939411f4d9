"""Whether metrics arrive at the server that Prometheus writes to, judged from Prometheus' counters."""

from __future__ import annotations

import pytest

from dalsegno.observe.remote_write import RemoteWriteHealth, WriteCounts, WriteState, judge_write

URL, NOW_S = "https://example.org/write", 1_800_000_000.0


@pytest.mark.parametrize(
    ("counts", "state", "why"),
    [
        (WriteCounts(), WriteState.UNKNOWN, ""),
        (WriteCounts(0.0, 0.0, 0.0, 0.0), WriteState.UNKNOWN, ""),
        (WriteCounts(NOW_S - 20, 400.4, 0.0, 7.0), WriteState.UP, ""),
        (WriteCounts(NOW_S - 20, 400.4, 0.3), WriteState.FAILING, "the server refused 1 samples in the last 5m"),
        (WriteCounts(NOW_S - 180, 0.0, 0.0, 9.0), WriteState.FAILING, "no sample has arrived for 180 s"),
        (WriteCounts(0.0, 0.0, 0.0, 9.0), WriteState.FAILING, "no sample has arrived yet; Prometheus tries again"),
    ],
    ids=["just started", "nothing sent", "arrives", "refused", "late", "never"],
)
def test_state_of_remote_write(counts: WriteCounts, state: WriteState, why: str):
    assert judge_write(URL, counts, NOW_S) == RemoteWriteHealth(URL, state, round(counts.sent or 0), why)
