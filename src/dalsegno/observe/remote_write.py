"""Judge whether the metrics that Prometheus writes to another server arrive there. Pure, except for `read_writes`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from dalsegno.observe.prometheus_client import PrometheusClient

PREFIX = "prometheus_remote_storage_"
KEPT = f"{PREFIX}.*"  # the metrics of Prometheus itself that it records; each has one series per server
WINDOW = "5m"
LATE_S = 120.0  # Prometheus sends after 5 s, and one write may take up to 30 s


class WriteState(Enum):
    """Whether a server accepts the metrics."""

    UP = "up"
    FAILING = "failing"
    UNKNOWN = "unknown"  # Prometheus has just started


@dataclass(frozen=True)
class WriteCounts:
    """What Prometheus counts for one server. None stands for a counter that has too few values yet."""

    last_sent_s: float | None = None  # time stamp of the newest sample that was sent; 0 if none was
    sent: float | None = None
    refused: float | None = None
    retried: float | None = None


@dataclass(frozen=True)
class RemoteWriteHealth:
    """A server that Prometheus writes to. `why` says what fails; "" if nothing does."""

    url: str
    state: WriteState
    sent: int = 0  # samples in the last five minutes
    why: str = ""


def judge_write(url: str, counts: WriteCounts, now_s: float) -> RemoteWriteHealth:
    """Return whether a server accepts the metrics."""
    sent, refused = round(counts.sent or 0), round(counts.refused or 0)
    why = ""
    if counts.refused:
        why = f"the server refused {max(refused, 1)} samples in the last {WINDOW}"
    elif counts.last_sent_s and now_s - counts.last_sent_s > LATE_S:
        why = f"no sample has arrived for {now_s - counts.last_sent_s:.0f} s"
    elif not counts.last_sent_s and counts.retried:
        why = "no sample has arrived yet; Prometheus tries again"
    if why:
        return RemoteWriteHealth(url, WriteState.FAILING, sent, why)
    return RemoteWriteHealth(url, WriteState.UP if counts.last_sent_s else WriteState.UNKNOWN, sent)


def read_writes(client: PrometheusClient, url: str, now_s: float) -> RemoteWriteHealth:
    """Ask Prometheus whether the metrics that it writes to this address arrive."""
    queries = {
        "last_sent_s": f"max by (url) ({PREFIX}queue_highest_sent_timestamp_seconds)",
        "sent": f"sum by (url) (increase({PREFIX}samples_total[{WINDOW}]))",
        "refused": f"sum by (url) (increase({PREFIX}samples_failed_total[{WINDOW}]))",
        "retried": f"sum by (url) ({PREFIX}samples_retried_total)",
    }
    found: Mapping[str, float | None] = {
        name: next((each.value for each in client.query(expr) if each.labels.get("url") == url), None)
        for name, expr in queries.items()
    }
    return judge_write(url, WriteCounts(**found), now_s)
