"""Run checks: observe the node, judge the observation, and return `unknown` if that fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dalsegno.health.check import Check, Context
from dalsegno.health.messages import MAX_TEXT, Finding
from dalsegno.health.node_reader import NodeReader
from dalsegno.health.result import MAX_REASON, Remedy, Result, Verdict, unknown
from dalsegno.health.settings import Settings, cap_remedy, every_s, is_enabled, thresholds
from dalsegno.system.hanging_calls import NoAnswer

CHOSEN_S = 30.0
USUAL_PACE_S = 0.05  # an empty program takes a few milliseconds on an idle machine, and this long on a busy one
MAX_SLOWDOWN = 20.0


class Checkup:
    """Runs the checks of a node repeatedly, each at its own interval.

    >>> checkup = Checkup(CHECKS, LocalNode(expected), settings)
    >>> while True: report(checkup.due(Context.CONTINUOUS)); sleep(1)
    """

    def __init__(self, checks: Sequence[Check], node: NodeReader, settings: Settings) -> None:
        self.checks, self.node, self.settings = checks, node, settings
        self._last: dict[tuple[Context, str], float] = {}
        self._failing: dict[str, float] = {}  # failing check -> time of its first failure
        self._settle_s: dict[str, float] = {}  # failing check -> how long it must fail before it counts
        self._chosen: dict[Context, tuple[float, list[Check]]] = {}

    def names(self, context: Context) -> list[str]:
        """Return the names of all checks that run on this node in this context."""
        return [check.name for check in self._checks_for(context)]

    def due(self, context: Context) -> list[Finding]:
        """Run the checks of this context that are due, and return their findings. At the first call, all checks are
        due."""
        return [each for each in self.run_due(context) if isinstance(each, Finding)]

    def run_due(self, context: Context, without: frozenset[str] = frozenset()) -> Iterator[str | Finding]:
        """Run the due checks one by one: yield a check's name, then its finding."""
        now, answers = self.node.now(), _RoundAnswers(self.node)
        for check in self._checks_for(context):
            if check.name not in without and self._is_due(check, context, now):
                self._last[context, check.name] = now
                yield check.name
                yield self._apply_settling(check, _finding(check, answers, self.node, self.settings), context)

    def _checks_for(self, context: Context) -> list[Check]:
        """Return the checks that apply to this node. The list is refreshed at intervals: hardware rarely changes."""
        at, chosen = self._chosen.get(context, (-math.inf, []))
        if not 0 <= self.node.now() - at < CHOSEN_S:
            at, chosen = self.node.now(), _choose_checks(self.checks, context, self.node, self.settings)
            self._chosen[context] = at, chosen
        return chosen

    def all(self, context: Context) -> list[Finding]:
        return examine(self.checks, context, self.node, self.settings)

    def _is_due(self, check: Check, context: Context, now: float) -> bool:
        """Return whether a check is due. A failure that does not count yet is checked in every round."""
        last = self._last.get((context, check.name))
        if last is None or not 0 <= now - last < every_s(check, self.settings):
            return True
        return check.name in self._failing and last - self._failing[check.name] < self._settle_s[check.name]

    def _apply_settling(self, check: Check, finding: Finding, context: Context) -> Finding:
        """Turn a failure into a warning until it has lasted long enough: slurmd may be restarting, or heat may be
        brief."""
        result = finding.result
        if context is not Context.CONTINUOUS or result.verdict is not Verdict.FAILED:
            self._failing.pop(check.name, None)
            self._settle_s.pop(check.name, None)
            return finding
        lasted_s = finding.at - self._failing.setdefault(check.name, finding.at)
        settle_s = self._settle_s[check.name] = max(self._settle_s.get(check.name, 0.0), self._settling_s(check))
        if not 0 <= lasted_s < settle_s:
            return finding
        text = _line(f"{result.text} (counts as failed after {settle_s:.3g} s)")
        return replace(finding, result=Result(Verdict.WARNED, text, Remedy.WATCH, result.code))

    def _settling_s(self, check: Check) -> float:
        """Return how long a failure must last: longer on a slow machine, where a restarted slurmd takes longer."""
        if not check.settle_s:
            return 0.0
        try:
            slower = self.node.pace_s() / USUAL_PACE_S
        except NoAnswer:
            slower = 1.0
        return check.settle_s * min(max(slower, 1.0), MAX_SLOWDOWN)


def examine(
    checks: Iterable[Check],
    context: Context,
    node: NodeReader,
    settings: Settings,
    *,
    within_s: float = math.inf,
    known: Mapping[str, Finding] | None = None,
) -> list[Finding]:
    """Run all enabled checks of the context that apply to the node, and return their findings.

    Checks with the same `ask` share the answer. Checks in `known` are not run again, and after `within_s` no further
    check is started.
    """
    answers, found, until = _RoundAnswers(node), [], node.now() + within_s
    for check in _choose_checks(checks, context, node, settings):
        if known and check.name in known:
            found.append(known[check.name])
        elif node.now() <= until:
            found.append(_finding(check, answers, node, settings))
        else:
            found.append(Finding(check.name, unknown("not run: out of time"), node.now()))
    return found


def confirm(
    checks: Iterable[Check],
    findings: Sequence[Finding],
    repeat: Callable[[list[Check]], list[Finding]],
    wait: Callable[[float], None],
) -> list[Finding]:
    """Repeat failed checks that have a settling time, because their failure may end without a repair.

    Return all findings, the repeated ones with their new results.
    """
    failed = {each.check for each in findings if each.result.verdict is Verdict.FAILED}
    again = [check for check in checks if check.name in failed and check.settle_s]
    if not again:
        return list(findings)
    wait(max(check.settle_s for check in again))
    later = {each.check: each for each in repeat(again)}
    return [later.get(each.check, each) for each in findings]


def _choose_checks(checks: Iterable[Check], context: Context, node: NodeReader, settings: Settings) -> list[Check]:
    wanted = (check for check in checks if context in check.contexts and is_enabled(check, settings))
    return [check for check in wanted if _applies(check, node)]


def _finding(check: Check, answers: _RoundAnswers, node: NodeReader, settings: Settings) -> Finding:
    result = cap_remedy(check, settings, _result(check, answers, settings))
    return Finding(check.name, result, node.now())


def _applies(check: Check, node: NodeReader) -> bool:
    try:
        return check.applies(node)
    except NoAnswer:
        return True  # the check then runs and reports the error


def _result(check: Check, answers: _RoundAnswers, settings: Settings) -> Result:
    try:
        return _make_printable(check.judge(answers.to(check.ask), **thresholds(check, settings)))
    except NoAnswer as error:
        return unknown(_line(str(error)))
    except ValueError as error:  # the judge raises it for unexpected output
        return unknown(_line(f"not understood: {error}"))
    except Exception as error:  # a broken check must not stop the others
        return unknown(_line(f"not understood: {type(error).__name__}: {error}"))


class _RoundAnswers:
    """The answers of one round. Checks with the same `ask` share one answer."""

    def __init__(self, node: NodeReader) -> None:
        self._node = node
        self._known: dict[Callable[[NodeReader], Any], Any] = {}

    def to(self, ask: Callable[[NodeReader], Any]) -> Any:
        if ask not in self._known:
            try:
                self._known[ask] = ask(self._node)
            except Exception as error:
                self._known[ask] = error
        answer = self._known[ask]
        if isinstance(answer, Exception):
            raise answer
        return answer


def _make_printable(result: Result) -> Result:
    """Return the result as reports require it: printable and short."""
    return Result(result.verdict, _line(result.text), result.remedy, _line(result.code))


def _line(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))[:MAX_TEXT]


# Summary of a node in one line, for other tools


_REPAIRS = {Remedy.RESET, Remedy.REBOOT, Remedy.REPLACE}


def result_line(host: str, findings: Sequence[Finding]) -> str:
    """Return `HEALTH_CHECK_RESULT:<host>:<Passed|Failed|Skipped>:<none|reset|reboot|replace>:<reason>`."""
    failed = [each for each in findings if each.result.verdict is Verdict.FAILED]
    if failed:
        remedy = max((each.result.remedy for each in failed), key=list(Remedy).index)
        action = remedy.value if remedy in _REPAIRS else "none"
        return f"HEALTH_CHECK_RESULT:{host}:Failed:{action}:{reason(failed)}"
    known = [each for each in findings if each.result.verdict is not Verdict.UNKNOWN]
    word, why = (
        ("Passed", _summarize_passed(known, findings)) if known else ("Skipped", reason(findings) or "no check applies")
    )
    return f"HEALTH_CHECK_RESULT:{host}:{word}:none:{why}"


def _summarize_passed(known: Sequence[Finding], findings: Sequence[Finding]) -> str:
    """Return how many checks gave a result, and which are unknown."""
    rest = [label(each) for each in findings if each not in known]
    return f"{len(known)} checks" + (f"; {len(rest)} unknown: {', '.join(rest)}" if rest else "")


def drain_reason(findings: Sequence[Finding]) -> str:
    """Return the reason for draining a node, as the controller writes it: `dalsegno:reboot:xid[79] …`"""
    failed = [each for each in findings if each.result.verdict is Verdict.FAILED]
    if not failed:
        return ""
    worst = max(failed, key=lambda each: list(Remedy).index(each.result.remedy))
    return f"dalsegno:{worst.result.remedy.value}:{label(worst)} {worst.result.text}"[:MAX_REASON]


def reason(findings: Sequence[Finding]) -> str:
    """Return the label and text of each finding, the heaviest remedy first: `xid[79] GPU has fallen off the bus; …`"""
    heaviest = sorted(findings, key=lambda each: -list(Remedy).index(each.result.remedy))
    return "; ".join(f"{label(each)} {each.result.text}" for each in heaviest)


def label(finding: Finding) -> str:
    code = finding.result.code
    return f"{finding.check}[{code}]" if code else finding.check
