"""Tests of the agent's reports: changes at once, and a full report at intervals, within the limits."""

from __future__ import annotations

from dalsegno.health.messages import (
    MAX_FINDINGS,
    MAX_TEXT,
    Finding,
    GpuIdentity,
    NewFindings,
    NodeReport,
    parse_agent_message,
)
from dalsegno.health.result import Remedy, failed, passed
from dalsegno.health.wire import AGENT, MAX_MESSAGE_BYTES
from dalsegno.node_agent.findings import WHOLE_S, Findings
from dalsegno.recovery.agents.table import merge
from dalsegno.wire.frames import Message
from dalsegno.wire.handshake import Seal

XID = Finding("xid", failed("Xid 79", Remedy.REBOOT, "79"), 17.0)
WELL = Finding("disk", passed("12 % full"), 17.0)


def parsed(messages: list[Message]) -> list[NewFindings]:
    words = [parse_agent_message(message) for message in messages]
    return [word for word in words if isinstance(word, NewFindings)]


def test_the_first_message_is_a_full_report_and_later_ones_are_changes():
    findings = Findings("gpu-1", "boot-1")
    findings.note(WELL)
    findings.set_gpus([GpuIdentity(0, "GPU-1")])
    assert parsed(findings.messages(0.0)) == [
        NewFindings(NodeReport("gpu-1", "boot-1", (WELL,), (GpuIdentity(0, "GPU-1"),)), frozenset({"disk"}))
    ]
    assert findings.messages(1.0) == []
    findings.note(Finding("disk", WELL.result, 18.0))
    assert findings.messages(1.0) == [], "an unchanged finding is not sent"
    findings.note(XID)
    assert parsed(findings.messages(1.0)) == [NewFindings(NodeReport("gpu-1", "boot-1", (XID,)))]
    (whole,) = parsed(findings.messages(WHOLE_S))
    assert whole.all == {"disk", "xid"} and whole.report.findings[0].at == 18.0


def test_a_new_connection_starts_with_a_full_report():
    findings = Findings("gpu-1", "boot-1")
    findings.note(XID)
    findings.messages(0.0)
    findings.begin_again()
    assert parsed(findings.messages(1.0))[0].report.findings == (XID,)


def test_findings_of_removed_checks_are_dropped():
    findings = Findings("gpu-1", "boot-1")
    findings.note(XID)
    findings.note(WELL)
    before = merge(None, parsed(findings.messages(0.0))[0])
    findings.keep({"disk"})
    after = merge(before, parsed(findings.messages(1.0))[0])
    assert after.findings == (WELL,)


def test_the_longest_report_fits_into_valid_messages():
    findings = Findings("gpu-1", "boot-1")
    for number in range(2 * MAX_FINDINGS):
        findings.note(Finding(f"{number:03}" + '"' * MAX_TEXT, failed("ü" * 1000, Remedy.DRAIN, "ü" * 1000), 1.0))
    findings.set_gpus([GpuIdentity(number, '"' * MAX_TEXT, '"' * MAX_TEXT, '"' * MAX_TEXT) for number in range(100)])
    messages = findings.messages(0.0)
    seal = Seal(b"s" * 32, AGENT)
    assert all(len(seal.close(message)) < MAX_MESSAGE_BYTES for message in messages)
    report = None
    for each in parsed(messages):
        report = merge(report, each)
    assert report is not None and len(report.findings) == MAX_FINDINGS and len(findings.all()) == MAX_FINDINGS


def test_unprintable_text_is_replaced():
    findings = Findings("gpu-1", "boot-1")
    findings.note(Finding("a\nb", passed("\ud800\0 tab\t"), float("inf")))
    findings.set_gpus([GpuIdentity(0, "GPU\n1", "\0")])
    (word,) = parsed(findings.messages(0.0))
    assert word.report.findings == (Finding("a?b", passed("?? tab?"), 0.0),)
    assert word.report.gpus == (GpuIdentity(0, "GPU?1", "?"),)
