"""The last word on a node in one line that other tools read too."""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.health.report import Finding
from dalsegno.health.result import Remedy, Verdict

LONGEST_REASON = 200  # more makes `sinfo -R` unreadable
_SAID = {Remedy.RESET, Remedy.REBOOT, Remedy.REPLACE}


def result_line(host: str, findings: Sequence[Finding]) -> str:
    """`HEALTH_CHECK_RESULT:<host>:<Passed|Failed|Skipped>:<none|reset|reboot|replace>:<reason>`"""
    failed = [each for each in findings if each.result.verdict is Verdict.FAILED]
    if failed:
        remedy = max((each.result.remedy for each in failed), key=list(Remedy).index)
        said = remedy.value if remedy in _SAID else "none"
        return f"HEALTH_CHECK_RESULT:{host}:Failed:{said}:{reason(failed)}"
    known = [each for each in findings if each.result.verdict is not Verdict.UNKNOWN]
    word, why = ("Passed", _counted(known, findings)) if known else ("Skipped", reason(findings) or "no check applies")
    return f"HEALTH_CHECK_RESULT:{host}:{word}:none:{why}"


def _counted(known: Sequence[Finding], findings: Sequence[Finding]) -> str:
    """What nobody knows has not passed."""
    rest = [label(each) for each in findings if each not in known]
    return f"{len(known)} checks" + (f"; {len(rest)} unknown: {', '.join(rest)}" if rest else "")


def drain_reason(findings: Sequence[Finding]) -> str:
    """Why a node is drained, in the form that our controller knows for its own: `dalsegno:reboot:xid[79] …`"""
    failed = [each for each in findings if each.result.verdict is Verdict.FAILED]
    if not failed:
        return ""
    worst = max(failed, key=lambda each: list(Remedy).index(each.result.remedy))
    return f"dalsegno:{worst.result.remedy.value}:{label(worst)} {worst.result.text}"[:LONGEST_REASON]


def reason(findings: Sequence[Finding]) -> str:
    """Which check says what, the heaviest first: `xid[79] GPU has fallen off the bus; munge …`"""
    heaviest = sorted(findings, key=lambda each: -list(Remedy).index(each.result.remedy))
    return "; ".join(f"{label(each)} {each.result.text}" for each in heaviest)


def label(finding: Finding) -> str:
    code = finding.result.code
    return f"{finding.check}[{code}]" if code else finding.check
