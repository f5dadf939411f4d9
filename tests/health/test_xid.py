"""Tests of Xids: the table, the action named by the driver, and repetitions."""

from __future__ import annotations

import pytest

from dalsegno.health import Remedy, Result, Verdict
from dalsegno.health.checks.gpu import XidLog, judge_xid
from dalsegno.health.facts import LogLine
from dalsegno.health.readers.host import KernelLines
from dalsegno.health.telemetry import xid_line
from dalsegno.health.xids import events, table

NOW = 1_700_000_000.0
TO_REBOOT = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
TO_RESET = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
TO_DRAIN = "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)"
TO_NOTHING = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"


def judge(*lines: str, a100: bool = False, ago_s: float = 60, **thresholds: float) -> Result:
    said = KernelLines(tuple(LogLine(NOW - ago_s, line, 3) for line in lines), NOW)
    return judge_xid(XidLog(said, a100), **thresholds)


def remedy(*lines: str, a100: bool = False) -> Remedy:
    return judge(*lines, a100=a100).remedy


def test_the_table_has_the_remedy_of_each_xid() -> None:
    calls_for = {remedy: {row.xid for row in table().values() if row.remedy is remedy} for remedy in Remedy}
    assert calls_for[Remedy.REPLACE] == {54}
    assert calls_for[Remedy.REBOOT] == {79, 151, 168}
    assert calls_for[Remedy.RESET] == {46, 48, 62, 64, 74, 95, 110, 119, 120, 136, 140, 143, 155, 156, 158}
    assert calls_for[Remedy.NONE] == {13, 31, 43, 45, 63, 68, 92, 94}
    assert calls_for[Remedy.WATCH] == {81, 109, 121, 125, 126, *range(144, 151), 154, 157, 162, 163, 164}
    assert not calls_for[Remedy.DRAIN]


def test_xids_64_and_95_need_a_reboot_on_an_a100() -> None:
    for xid in (64, 95):
        assert (remedy(xid_line(xid, "")), remedy(xid_line(xid, ""), a100=True)) == (Remedy.RESET, Remedy.REBOOT)


def test_xid_109_fails_only_when_repeated() -> None:
    line = xid_line(109, "CTX SWITCH TIMEOUT")
    assert [judge(*[line] * count).verdict for count in (1, 2, 3)] == [Verdict.WARNED, Verdict.WARNED, Verdict.FAILED]
    assert judge(line, line, repeats=2).remedy is Remedy.RESET


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ((xid_line(48, "DBE"), xid_line(154, TO_REBOOT)), Remedy.REBOOT),
        (
            (xid_line(79, "off the bus"), xid_line(154, TO_RESET)),
            Remedy.RESET,
        ),  # the named action takes precedence over the table
        ((xid_line(31, "MMU Fault"), xid_line(154, TO_DRAIN)), Remedy.RESET),
        ((xid_line(154, TO_RESET), xid_line(154, TO_REBOOT)), Remedy.REBOOT),  # the last one counts
        ((xid_line(48, "DBE"), xid_line(154, TO_NOTHING)), Remedy.WATCH),
        ((xid_line(154, "an unknown action"),), Remedy.WATCH),
        ((xid_line(48, "DBE"), xid_line(154, "an unknown action")), Remedy.RESET),
        ((xid_line(48, "DBE", gpu=0), xid_line(154, TO_NOTHING, gpu=1)), Remedy.RESET),  # the action is for another GPU
    ],
)
def test_xid_154_names_the_action_of_its_gpu(lines: tuple[str, ...], wanted: Remedy) -> None:
    assert remedy(*lines) is wanted


def test_the_heaviest_xid_is_reported() -> None:
    found = judge(xid_line(31, "MMU Fault"), xid_line(79, "GPU has fallen off the bus."), xid_line(48, "DBE"))
    assert (found.verdict, found.remedy, found.code) == (Verdict.FAILED, Remedy.REBOOT, "79")
    assert "0000:41:00" in found.text


def test_faults_of_programs_never_fail_the_node() -> None:
    assert judge(xid_line(31, "MMU Fault"), xid_line(13, "x"), xid_line(94, "Contained")).verdict is Verdict.PASSED


def test_an_xid_that_is_not_in_the_table_is_watched() -> None:
    assert judge(xid_line(999, "new")).verdict is Verdict.WARNED


def test_old_xids_do_not_count() -> None:
    assert judge(xid_line(79, "x"), ago_s=90_000).verdict is Verdict.PASSED
    assert judge(xid_line(79, "x"), ago_s=900, window_s=600).verdict is Verdict.PASSED


def test_all_formats_of_xid_lines_are_parsed() -> None:
    lines = [
        "NVRM: Xid (PCI:0000:41:00): 79, pid=4242, GPU has fallen off the bus.",
        "NVRM: Xid (0000:41:00): 31, Ch 00000010",
        "[ 1234.5] NVRM: Xid (PCI:0000:C1:00): 62, 0a1b(2c3d) 00000000",
        "NVRM: Xid (PCI:0000:41:00): 119, pid='<unknown>', name=<unknown>, Timeout after 6s",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module",
    ]
    assert [event.xid for event in events([LogLine(NOW, line) for line in lines])] == [79, 31, 62, 119]
