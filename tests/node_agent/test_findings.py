"""What the agent tells of its findings: changes at once, all of it now and then, never more than is taken."""

from __future__ import annotations

from dalsegno.health.messages import LONGEST, MOST_FINDINGS, Finding, GpuIdentity, NewFindings, NodeReport, read_word
from dalsegno.health.result import Remedy, failed, passed
from dalsegno.health.wire import AGENT, MOST_BYTES, NodeHello, seal_of
from dalsegno.node_agent.findings import WHOLE_S, Findings
from dalsegno.recovery.agents import merge
from dalsegno.wire.frames import Message

XID = Finding("xid", failed("Xid 79", Remedy.REBOOT, "79"), 17.0)
WELL = Finding("disk", passed("12 % full"), 17.0)


def told(messages: list[Message]) -> list[NewFindings]:
    words = [read_word(message) for message in messages]
    return [word for word in words if isinstance(word, NewFindings)]


def test_the_first_word_is_a_whole_report_and_then_only_what_changed():
    findings = Findings("gpu-1", "boot-1")
    findings.note(WELL)
    findings.know([GpuIdentity(0, "GPU-1")])
    assert told(findings.messages(0.0)) == [
        NewFindings(NodeReport("gpu-1", "boot-1", (WELL,), (GpuIdentity(0, "GPU-1"),)), frozenset({"disk"}))
    ]
    assert findings.messages(1.0) == []
    findings.note(Finding("disk", WELL.result, 18.0))
    assert findings.messages(1.0) == [], "the same again is no news"
    findings.note(XID)
    assert told(findings.messages(1.0)) == [NewFindings(NodeReport("gpu-1", "boot-1", (XID,)))]
    (whole,) = told(findings.messages(WHOLE_S))
    assert whole.all == {"disk", "xid"} and whole.report.findings[0].at == 18.0


def test_another_controller_hears_all_of_it():
    findings = Findings("gpu-1", "boot-1")
    findings.note(XID)
    findings.messages(0.0)
    findings.begin_again()
    assert told(findings.messages(1.0))[0].report.findings == (XID,)


def test_a_check_that_is_no_more_is_taken_back():
    findings = Findings("gpu-1", "boot-1")
    findings.note(XID)
    findings.note(WELL)
    before = merge(None, told(findings.messages(0.0))[0])
    findings.keep({"disk"})
    after = merge(before, told(findings.messages(1.0))[0])
    assert after.findings == (WELL,)


def test_the_longest_report_there_can_be_arrives_whole_in_messages_that_are_taken():
    findings = Findings("gpu-1", "boot-1")
    for number in range(2 * MOST_FINDINGS):
        findings.note(Finding(f"{number:03}" + '"' * LONGEST, failed("ü" * 1000, Remedy.DRAIN, "ü" * 1000), 1.0))
    findings.know([GpuIdentity(number, '"' * LONGEST, '"' * LONGEST, '"' * LONGEST) for number in range(100)])
    messages = findings.messages(0.0)
    seal = seal_of(AGENT, b"s" * 32, NodeHello("gpu-1", "boot-1", 1.0, "0" * 32), "0" * 32)
    assert all(len(seal.close(message)) < MOST_BYTES for message in messages)
    report = None
    for each in told(messages):
        report = merge(report, each)
    assert report is not None and len(report.findings) == MOST_FINDINGS and len(findings.all()) == MOST_FINDINGS


def test_what_cannot_be_shown_is_made_so_that_it_is_taken():
    findings = Findings("gpu-1", "boot-1")
    findings.note(Finding("a\nb", passed("\ud800\0 tab\t"), float("inf")))
    findings.know([GpuIdentity(0, "GPU\n1", "\0")])
    (word,) = told(findings.messages(0.0))
    assert word.report.findings == (Finding("a?b", passed("?? tab?"), 0.0),)
    assert word.report.gpus == (GpuIdentity(0, "GPU?1", "?"),)
