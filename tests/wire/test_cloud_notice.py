"""Notices of a cloud: their codes, and the answers of EC2's metadata service in the forms that EC2 documents."""

import json

import pytest

from dalsegno.wire.cloud_notice import (
    BadNotice,
    CloudNotice,
    NoticeKind,
    find_notice,
    parse_code,
    parse_rebalance,
    parse_scheduled,
    parse_spot,
)

AT = 1795003320.0  # 2026-11-18T12:02:00Z
SPOT = CloudNotice(NoticeKind.SPOT, AT, "terminate")
EVENT = {
    "NotBefore": "18 Nov 2026 12:02:00 GMT",
    "Code": "instance-retirement",
    "Description": "The instance is running on degraded hardware",
    "EventId": "instance-event-0d59937288b749b32",
    "NotAfter": "18 Nov 2026 14:02:00 GMT",
    "State": "active",
}


def test_notice_survives_the_way_through_a_drain_reason():
    assert SPOT.code == "spot:2026-11-18T12:02:00Z"
    found = find_notice(f"dalsegno:drain:cloud-notice[{SPOT.code}] {SPOT.summary}")
    assert found == CloudNotice(NoticeKind.SPOT, AT)
    assert SPOT.summary == "the cloud provider ends this instance at 2026-11-18T12:02:00Z (spot: terminate)"


@pytest.mark.parametrize(
    "reason",
    ["", "new RAM", "dalsegno:reboot:xid[79] off the bus", "dalsegno:drain:cloud-notice", "dalsegno:spare",
     "dalsegno:drain:cloud-notice[spot]", "cloud-notice[spot:2026-11-18T12:02:00Z]"],
)  # fmt: skip
def test_other_drain_reasons_are_no_notices(reason: str):
    assert find_notice(reason) is None


@pytest.mark.parametrize("code", ["", "79", "spot:soon", "alien:2026-11-18T12:02:00Z", "spot:2026-13-18T12:02:00Z"])
def test_other_codes_are_no_notices(code: str):
    assert parse_code(code) is None


def test_spot_interruption_is_read():
    assert parse_spot('{"action": "terminate", "time": "2026-11-18T12:02:00Z"}') == SPOT
    assert parse_spot('{"action":"stop","time":"2026-11-18T12:02:00Z","new":1}').action == "stop"


def test_deadline_of_a_spot_interruption_does_not_depend_on_this_machines_clock():
    """The time is EC2's. A node whose clock is wrong reports the same time to the controller."""
    assert parse_spot('{"action": "terminate", "time": "1999-01-01T00:00:00Z"}').deadline == 915148800.0


@pytest.mark.parametrize(
    "text",
    ["", "<html>", "[]", "null", "7", '{"action": "terminate"', '{"action": "terminate"}', '{"time": 5, "action": "a"}',
     '{"action": "terminate", "time": "in two minutes"}', '{"action": "a\\nb", "time": "2026-11-18T12:02:00Z"}',
     '{"action": null, "time": "2026-11-18T12:02:00Z"}', "[" * 100_000],
)  # fmt: skip
def test_malformed_spot_interruption_is_refused(text: str):
    with pytest.raises(BadNotice):
        parse_spot(text)


def test_scheduled_events_that_take_the_machine_are_read_the_earliest_first():
    later = {**EVENT, "Code": "instance-stop", "NotBefore": "19 Nov 2026 12:02:00 GMT"}
    assert parse_scheduled(json.dumps([later, EVENT])) == [
        CloudNotice(NoticeKind.MAINTENANCE, AT, "instance-retirement"),
        CloudNotice(NoticeKind.MAINTENANCE, AT + 86400, "instance-stop"),
    ]


@pytest.mark.parametrize("change", [{"State": "completed"}, {"State": "canceled"}, {"Code": "system-maintenance"}])
def test_events_that_are_over_or_leave_the_machine_running_are_not_notices(change: dict[str, str]):
    assert parse_scheduled(json.dumps([{**EVENT, **change}])) == []


@pytest.mark.parametrize(
    "events", [{}, [7], [{"State": "active"}], [{**EVENT, "NotBefore": "tomorrow"}], [EVENT] * 101]
)
def test_malformed_scheduled_events_are_refused(events: object):
    with pytest.raises(BadNotice):
        parse_scheduled(json.dumps(events))


def test_rebalance_recommendation_is_read():
    assert parse_rebalance('{"noticeTime": "2026-11-18T12:02:00Z"}') == AT
    with pytest.raises(BadNotice):
        parse_rebalance('{"noticeTime": null}')
