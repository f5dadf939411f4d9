"""Notices in which a cloud announces that it will stop or reclaim a machine, and parsers for them. No I/O.

A notice is encoded as text such as `cloud-notice[spot:2026-11-18T12:02:00Z]`. This text is the code of a failed health
check, and it is part of a drain reason.
"""

from __future__ import annotations

import json
import re
from calendar import timegm
from dataclasses import dataclass
from enum import Enum
from time import gmtime, strftime, strptime
from typing import Any

CHECK = "cloud-notice"  # name of the health check that reports notices
CLOUD_FILE = "dalsegno-cloud.json"  # a file beside slurm.conf that describes the cloud, for node agents and run agents
HYPERPOD = "hyperpod"  # SageMaker HyperPod announces nothing on its instances; only the end of a plan is known
CLOUDS = ("ec2", HYPERPOD)
RESERVATION_S = 600.0  # the end of reserved capacity becomes a notice this long before it, unless the file has another
SPOT_S = 120.0  # EC2 announces the termination of a spot instance two minutes in advance
MAX_EVENTS = 100
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_CODE = re.compile(r"([a-z-]{1,32}):(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)")
_REASON = re.compile(rf"dalsegno:[a-z]+:{CHECK}\[([^\]]*)\]")


class NoticeKind(Enum):
    """The reason why the cloud stops or reclaims a machine."""

    SPOT = "spot"  # the cloud reclaims a spot instance because it needs the capacity
    CAPACITY_BLOCK = "capacity-block"  # the reserved time ends, and the cloud reclaims the machine
    MAINTENANCE = "maintenance"  # the machine is stopped, retired or rebooted at a scheduled time


class BadNotice(ValueError):
    """The answer of the metadata service is not a valid notice."""


@dataclass(frozen=True)
class CloudNotice:
    """A notice. `deadline` is when the cloud stops or reclaims the machine, in seconds since 1970."""

    kind: NoticeKind
    deadline: float
    action: str = ""  # what the cloud does at the deadline, in EC2's terms: terminate, stop, instance-retirement

    @property
    def code(self) -> str:
        return f"{self.kind.value}:{format_time(self.deadline)}"

    @property
    def summary(self) -> str:
        """Return a line such as `the cloud provider ends this instance at 2026-11-18T12:02:00Z (spot: terminate)`."""
        why = f"{self.kind.value}: {self.action}" if self.action else self.kind.value
        return f"the cloud provider ends this instance at {format_time(self.deadline)} ({why})"


@dataclass(frozen=True)
class CloudSite:
    """The cloud of a node.

    `ends_at` is when the cloud starts to take back the node's reserved machine, in seconds since 1970.
    """

    cloud: str
    ends_at: float | None = None
    reservation_s: float = RESERVATION_S

    def end_notice(self, now: float, reservation_s: float | None = None) -> CloudNotice | None:
        """Return the notice that the reserved time ends; None if there is no end, or it is not close yet.

        `reservation_s` takes precedence over that of the file.
        """
        lead_s = self.reservation_s if reservation_s is None else reservation_s
        if self.ends_at is None or now < self.ends_at - lead_s:
            return None
        return CloudNotice(NoticeKind.CAPACITY_BLOCK, self.ends_at, "reserved time ends")


def parse_cloud(text: str, node: str) -> CloudSite:
    """Parse CLOUD_FILE for one node. Raise ValueError if it is not valid."""
    value = json.loads(text)
    if not isinstance(value, dict) or value.get("cloud") not in CLOUDS or not isinstance(value.get("ends"), dict):
        raise ValueError("not a description of a cloud")
    end, lead_s = value["ends"].get(node), value.get("reservation_s", RESERVATION_S)
    if end is not None and not (type(end) in (int, float) and 0 < end < 1e11):
        raise ValueError(f"not the end of a reservation: {end!r}")
    if not (type(lead_s) in (int, float) and -1e11 < lead_s < 1e11):
        raise ValueError(f"not a number of seconds: {lead_s!r}")
    return CloudSite(value["cloud"], end, lead_s)


def format_time(at: float) -> str:
    return strftime(_TIME, gmtime(at))


def parse_code(code: str) -> CloudNotice | None:
    """Return the notice that is encoded in a health check's code; None if the code contains no notice."""
    found = _CODE.fullmatch(code)
    if not found:
        return None
    try:
        return CloudNotice(NoticeKind(found[1]), _utc(found[2]))
    except ValueError:
        return None


def find_notice(reason: str) -> CloudNotice | None:
    """Return the notice in a drain reason that the controller wrote; None for any other drain reason."""
    found = _REASON.match(reason)
    return parse_code(found[1]) if found else None


# Parsers for the answers of EC2's metadata service


# Events that stop or reboot the machine. Other events, such as network maintenance, leave it running.
TAKING = ("instance-stop", "instance-retirement", "instance-reboot", "system-reboot")


def parse_spot(text: str) -> CloudNotice:
    """Parse the item `spot/instance-action`, such as `{"action": "terminate", "time": "2026-11-18T12:02:00Z"}`."""
    answer = _object(text)
    action, at = answer.get("action"), answer.get("time")
    if not isinstance(action, str) or not isinstance(at, str) or not action.isprintable() or len(action) > 32:
        raise BadNotice(f"not an instance action: {text[:80]!r}")
    return CloudNotice(NoticeKind.SPOT, _utc(at), action)


def parse_rebalance(text: str) -> float:
    """Parse the item `events/recommendations/rebalance` and return when EC2 issued the recommendation."""
    at = _object(text).get("noticeTime")
    if not isinstance(at, str):
        raise BadNotice(f"not a rebalance recommendation: {text[:80]!r}")
    return _utc(at)


def parse_scheduled(text: str) -> list[CloudNotice]:
    """Parse the item `events/maintenance/scheduled`.

    Return the events that stop or reboot the machine, earliest first.
    """
    events = _json(text)
    if not isinstance(events, list) or len(events) > MAX_EVENTS:
        raise BadNotice(f"not a list of scheduled events: {text[:80]!r}")
    found = [_event(each) for each in events]
    return sorted((each for each in found if each is not None), key=lambda each: each.deadline)


def _event(event: Any) -> CloudNotice | None:
    if not isinstance(event, dict) or not isinstance(event.get("Code"), str):
        raise BadNotice("a scheduled event without a code")
    if event.get("State") != "active" or event["Code"] not in TAKING:
        return None
    return CloudNotice(NoticeKind.MAINTENANCE, _mail_date(event.get("NotBefore")), event["Code"])


def _mail_date(value: Any) -> float:
    """Parse the date of a scheduled event, such as `21 Jan 2026 09:00:43 GMT`."""
    from email.utils import parsedate_tz  # imported here to save memory, because only scheduled events need it

    found = parsedate_tz(value) if isinstance(value, str) else None
    if found is None:
        raise BadNotice(f"not a date: {str(value)[:40]!r}")
    return float(timegm((*found[:6], 0, 0, 0)) - (found[9] or 0))


def _object(text: str) -> dict[str, Any]:
    value = _json(text)
    if not isinstance(value, dict):
        raise BadNotice(f"not an object: {text[:80]!r}")
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadNotice(f"not JSON: {text[:80]!r}") from error


def _utc(text: str) -> float:
    try:
        return float(timegm(strptime(text, _TIME)))
    except ValueError as error:
        raise BadNotice(f"not a time: {text[:40]!r}") from error
