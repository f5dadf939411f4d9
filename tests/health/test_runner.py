"""Tests of running checks: intervals, settings, and errors that make a result unknown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dalsegno.health import Finding, Remedy, Result, Verdict, failed, parse_report, passed, report_message, unknown
from dalsegno.health.check import QUIET, Check, Context
from dalsegno.health.checks.gpu import ask_fabric_manager
from dalsegno.health.checks.late import blame
from dalsegno.health.expected import Expected
from dalsegno.health.messages import MAX_TEXT, NodeReport
from dalsegno.health.node_reader import NodeReader, RecordedNode
from dalsegno.health.runner import Checkup, confirm, examine, result_line
from dalsegno.spec.facts import CheckSetting
from dalsegno.system.hanging_calls import NoAnswer, TooLate


def ask_load(node: NodeReader) -> str:
    return node.read("/proc/loadavg")


def judge_load(text: str, *, most: float = 4.0) -> Result:
    load = float(text.split()[0])
    return failed(f"the load is {load:g}", Remedy.REBOOT) if load > most else passed("little to do")


LOAD = Check("load", "how busy it is", ask_load, judge_load, every_s=10)


@pytest.fixture
def node(tmp_path: Path) -> RecordedNode:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text("9.0 1.0 1.0 1/100 1234\n")
    return RecordedNode(tmp_path, Expected("gpu-1"))


def only(findings: list[Finding]) -> Result:
    (finding,) = findings
    return finding.result


def test_a_check_asks_and_judges(node: RecordedNode) -> None:
    found = only(examine([LOAD], Context.IDLE, node, {}))
    assert found == failed("the load is 9", Remedy.REBOOT)


def test_failure_that_may_pass_is_repeated_before_it_counts(node: RecordedNode) -> None:
    brief = Check("brief", "how busy it is", ask_load, judge_load, settle_s=5)
    quick = Check("quick", "how busy it is", ask_load, judge_load, settle_s=10)
    checks, waits = (LOAD, brief, quick), list[float]()
    first = examine(checks, Context.CONTINUOUS, node, {"quick": CheckSetting(thresholds={"most": 20.0})})
    (node.folder / "proc/loadavg").write_text("1.0 1.0 1.0 1/100 1234\n")
    later = confirm(checks, first, lambda again: examine(again, Context.CONTINUOUS, node, {}), waits.append)
    assert [each.result.verdict for each in first] == [Verdict.FAILED, Verdict.FAILED, Verdict.PASSED]
    assert [each.result.verdict for each in later] == [Verdict.FAILED, Verdict.PASSED, Verdict.PASSED]
    assert waits == [5], "only failed checks are repeated, and those whose failure counts at once are not"


@pytest.mark.parametrize(
    ("settings", "result"),
    [
        ({"load": CheckSetting(thresholds={"most": 20.0})}, passed("little to do")),
        ({"load": CheckSetting(action="drain")}, failed("the load is 9", Remedy.DRAIN)),
        ({"load": CheckSetting(action="replace")}, failed("the load is 9", Remedy.REBOOT)),
        ({"load": CheckSetting(action="watch")}, Result(Verdict.WARNED, "the load is 9", Remedy.WATCH)),
    ],
)
def test_settings_change_thresholds_and_limit_the_remedy(
    node: RecordedNode, settings: dict[str, CheckSetting], result: Result
) -> None:
    assert only(examine([LOAD], Context.IDLE, node, settings)) == result


def test_a_check_runs_only_if_enabled_and_in_its_contexts(node: RecordedNode) -> None:
    assert examine([LOAD], Context.IDLE, node, {"load": CheckSetting(enabled=False)}) == []
    quiet = Check("load", "", ask_load, judge_load, QUIET)
    assert examine([quiet], Context.PROLOG, node, {}) == []
    elsewhere = Check("load", "", ask_load, judge_load, applies=lambda node: node.has("dcgmi"))
    assert examine([elsewhere], Context.IDLE, node, {}) == []


def raises(error: Exception) -> Callable[[Any], Any]:
    def ask(_: Any) -> Any:
        raise error

    return ask


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (raises(NoAnswer("`dcgmi` is not installed")), "`dcgmi` is not installed"),
        (raises(TooLate("no answer within 5 s")), "no answer within 5 s"),
        (raises(ValueError("a\nb")), "not understood: a b"),
        (lambda _: "rubbish", "not understood: could not convert string to float: 'rubbish'"),
        (lambda _: None, "not understood: AttributeError: 'NoneType' object has no attribute 'split'"),
    ],
)
def test_an_error_makes_a_check_unknown_and_does_not_stop_the_others(
    node: RecordedNode, ask: Callable[[NodeReader], Any], why: str
) -> None:
    broken = Check("broken", "", ask, judge_load)
    found = examine([broken, LOAD], Context.IDLE, node, {})
    assert [each.result for each in found] == [unknown(why), failed("the load is 9", Remedy.REBOOT)]


def test_a_shared_question_is_asked_once(node: RecordedNode) -> None:
    asked = []

    def ask(_: NodeReader) -> str:
        asked.append(1)
        return "1.0"

    examine([Check("a", "", ask, judge_load), Check("b", "", ask, judge_load)], Context.IDLE, node, {})
    assert len(asked) == 1


def test_each_check_runs_at_its_interval(node: RecordedNode, tmp_path: Path) -> None:
    checkup = Checkup([LOAD], node, {})

    def ran_at(now: float) -> bool:
        (tmp_path / "now").write_text(str(now))
        return bool(checkup.due(Context.CONTINUOUS))

    # The last time is earlier, because the clock was set back.
    assert [now for now in (0, 1, 9.9, 10, 19, 20, 5) if ran_at(now)] == [0, 10, 20, 5]
    often = Checkup([LOAD], node, {"load": CheckSetting(every_s=1)})
    assert often.due(Context.CONTINUOUS) and not often.due(Context.CONTINUOUS) and often.due(Context.IDLE)


def test_a_temporary_failure_counts_only_after_it_has_lasted(node: RecordedNode, tmp_path: Path) -> None:
    patient = Check("load", "", ask_load, judge_load, every_s=10, settle_s=5)
    checkup = Checkup([patient], node, {})

    def seen(now: float, load: float) -> str:
        (tmp_path / "now").write_text(str(now))
        (tmp_path / "proc/loadavg").write_text(f"{load}")
        return " ".join(each.result.verdict.value for each in checkup.due(Context.CONTINUOUS))

    assert [seen(now, 9) for now in (0, 1, 4.9, 5, 6)] == ["warned", "warned", "warned", "failed", ""]
    assert [seen(15, 1), seen(25, 9), seen(26, 1), seen(36, 9)] == ["passed", "warned", "passed", "warned"]
    # A single run of the checks cannot wait for a second result.
    assert only(checkup.all(Context.IDLE)).verdict is Verdict.FAILED


def test_a_failure_must_last_longer_on_a_slow_machine(node: RecordedNode, tmp_path: Path) -> None:
    patient = Check("load", "", ask_load, judge_load, every_s=10, settle_s=5)
    checkup = Checkup([patient], node, {})
    (tmp_path / "pace_s").write_text("0.2")  # four times slower than usual

    def seen(now: float) -> str:
        (tmp_path / "now").write_text(str(now))
        return " ".join(each.result.verdict.value for each in checkup.due(Context.CONTINUOUS))

    assert [seen(0), seen(5)] == ["warned", "warned"]
    (tmp_path / "pace_s").write_text("0.01")  # the machine was slow when the failure began
    assert [seen(19), seen(20)] == ["warned", "failed"]


@pytest.mark.parametrize(("took_s", "verdict"), [(0.01, Verdict.FAILED), (0.3, Verdict.UNKNOWN)])
def test_a_broken_exchange_fails_unless_the_machine_is_slow(took_s: float, verdict: Verdict) -> None:
    found = blame("the exchange failed", Remedy.DRAIN, "broken", lambda: took_s)
    assert (found.verdict, found.text.startswith("the exchange failed")) == (verdict, True)


def test_every_result_fits_into_a_report(node: RecordedNode) -> None:
    def judge_loudly(text: str) -> Result:
        return failed("\x1b[31m" + "é\n" * 2000, Remedy.DRAIN, "a\tb")

    found = examine([Check("loud", "", ask_load, judge_loudly)], Context.IDLE, node, {})
    assert len(only(found).text) == MAX_TEXT
    report = NodeReport("gpu-1", "boot", tuple(found))
    assert parse_report(report_message(report)) == report


# The summary line


def test_the_summary_line_has_the_heaviest_remedy() -> None:
    found = [
        Finding("disk", failed("/ is full", Remedy.DRAIN), 0),
        Finding("xid", failed("fallen off", Remedy.REBOOT, "79"), 0),
        Finding("clock", unknown("no chronyc"), 0),
    ]
    assert result_line("gpu-1", found) == "HEALTH_CHECK_RESULT:gpu-1:Failed:reboot:xid[79] fallen off; disk / is full"
    assert result_line("gpu-1", found[:1]) == "HEALTH_CHECK_RESULT:gpu-1:Failed:none:disk / is full"


def test_unknown_is_neither_passed_nor_failed() -> None:
    lost = Finding("clock", unknown("no chronyc"), 0)
    assert result_line("n", [lost]) == "HEALTH_CHECK_RESULT:n:Skipped:none:clock no chronyc"
    assert result_line("n", []) == "HEALTH_CHECK_RESULT:n:Skipped:none:no check applies"
    assert (
        result_line("n", [lost, Finding("disk", passed("well"), 0)])
        == "HEALTH_CHECK_RESULT:n:Passed:none:1 checks; 1 unknown: clock"
    )


# Before a job


def test_known_findings_are_not_asked_again(node: RecordedNode) -> None:
    before = Finding("load", passed("a moment ago"), 5.0)
    assert examine([LOAD], Context.PROLOG, node, {}, known={"load": before}) == [before]


def test_no_check_starts_after_the_time_limit(node: RecordedNode, tmp_path: Path) -> None:
    def ask_slowly(node: NodeReader) -> str:
        (tmp_path / "now").write_text("1700000010")
        return "1.0"

    slow = Check("slow", "", ask_slowly, judge_load)
    found = examine([slow, LOAD], Context.PROLOG, node, {}, within_s=5)
    assert [each.result for each in found] == [passed("little to do"), unknown("not run: out of time")]


def test_the_fabric_manager_is_unknown_without_systemd(tmp_path: Path) -> None:
    (tmp_path / "commands").mkdir()
    (tmp_path / "commands/systemctl.exit1").write_text("")
    node = RecordedNode(tmp_path, Expected("gpu-1", gpus=8, gpu_type="h100"))
    with pytest.raises(NoAnswer, match="no answer from systemctl: no output"):
        ask_fabric_manager(node)
