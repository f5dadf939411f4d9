"""The check of a cloud's notices: whether the provider has announced the end of this instance, and when.

The check runs only on nodes that have a file about their cloud. The fault cannot be repaired: the run has to move.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from dalsegno.health.check import WATCHING, Check
from dalsegno.health.node_reader import NodeReader
from dalsegno.health.result import Remedy, Result, failed, passed, warned
from dalsegno.health.settings import thresholds
from dalsegno.spec.facts import Health
from dalsegno.system.hanging_calls import NoAnswer
from dalsegno.wire.cloud_notice import (
    CHECK,
    HYPERPOD,
    RESERVATION_S,
    CloudNotice,
    CloudSite,
    format_time,
    parse_cloud,
    parse_rebalance,
    parse_scheduled,
    parse_spot,
)
from dalsegno.wire.instance_metadata import REBALANCE, SCHEDULED, SPOT


@dataclass(frozen=True)
class NoticeAnswers:
    """The answers of the metadata service, as text; None for an item that the service does not have."""

    now: float
    site: CloudSite
    spot: str | None = None
    rebalance: str | None = None
    scheduled: str | None = None


def ask_notices(node: NodeReader) -> NoticeAnswers:
    """Read the notices of the cloud. The end of a reservation is known even if the metadata service does not answer."""
    site = parse_cloud(node.read(node.expected.cloud_file), node.expected.node)
    if site.cloud == HYPERPOD:
        return NoticeAnswers(node.now(), site)
    try:
        spot, rebalance, scheduled = (node.metadata(path) for path in (SPOT, REBALANCE, SCHEDULED))
    except NoAnswer:
        if site.ends_at is None:
            raise
        spot = rebalance = scheduled = None
    return NoticeAnswers(node.now(), site, spot, rebalance, scheduled)


def judge_notices(
    answers: NoticeAnswers, *, maintenance_s: float = 3600.0, reservation_s: float = RESERVATION_S
) -> Result:
    """Fail if the cloud takes the machine back soon.

    The notice for a spot instance comes two minutes before its end; other ends are known earlier. `maintenance_s` and
    `reservation_s` say how long before a scheduled event, and before the end of reserved capacity, the node is drained.
    """
    if answers.spot is not None:
        return _taken(parse_spot(answers.spot))
    if (end := answers.site.end_notice(answers.now, reservation_s)) is not None:
        return _taken(end)
    events = parse_scheduled(answers.scheduled) if answers.scheduled else []
    if events and answers.now >= events[0].deadline - maintenance_s:
        return _taken(events[0])
    if events:
        return warned(f"{events[0].action} is scheduled for {format_time(events[0].deadline)}", events[0].code)
    if answers.rebalance is not None:
        at = format_time(parse_rebalance(answers.rebalance))
        return warned(f"EC2 recommends to move away since {at}: an interruption is likely", "rebalance")
    return passed("the cloud has announced nothing")


def _taken(notice: CloudNotice) -> Result:
    return failed(notice.summary, Remedy.DRAIN, notice.code)


CLOUD_CHECKS = (
    Check(
        CHECK, "the cloud does not take the machine away", ask_notices, judge_notices, WATCHING, 5,
        applies=lambda node: bool(node.expected.cloud_file),
    ),
)  # fmt: skip


def cloud_text(health: Health, ends: dict[str, float] | None = None, cloud: str = "ec2") -> str:
    """Return the text of CLOUD_FILE. `ends` maps nodes to the end of their reserved capacity."""
    reservation_s = thresholds(CLOUD_CHECKS[0], health.checks)["reservation_s"]
    return json.dumps({"cloud": cloud, "ends": ends or {}, "reservation_s": reservation_s}, indent=1) + "\n"
