"""The last finding of each check, and which of them the controller does not have yet. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from dalsegno.health.messages import (
    MAX_FINDINGS,
    MAX_GPUS,
    MAX_TEXT,
    Finding,
    GpuIdentity,
    NewFindings,
    NodeReport,
    findings_message,
)
from dalsegno.health.result import Result
from dalsegno.wire.frames import Message

WHOLE_S = 30.0  # interval of full reports, which update the times of unchanged findings and repeat lost findings
MAX_MESSAGE = 40 << 10  # maximum characters of a message, well below the controller's limit
MAX_NAME = 64


class Findings:
    """The latest finding of each check. Older findings are dropped even if they were not sent, so that memory does not
    grow while the controller does not answer."""

    def __init__(self, node: str, boot: str) -> None:
        self.report = NodeReport(node, boot)
        self._latest: dict[str, Finding] = {}
        self._unsent: set[str] = set()
        self._whole_at = 0.0  # when a full report is due (monotonic); 0: at once

    def note(self, finding: Finding) -> None:
        finding = clean(finding)
        before = self._latest.get(finding.check)
        if before is None and len(self._latest) >= MAX_FINDINGS:
            return
        self._latest[finding.check] = finding
        if before is None or before.result != finding.result:
            self._unsent.add(finding.check)

    def keep(self, checks: Iterable[str]) -> None:
        """Drop the findings of checks that are not in `checks`, because these checks no longer exist."""
        kept = set(checks)
        if gone := set(self._latest) - kept:
            self._latest = {check: each for check, each in self._latest.items() if check in kept}
            self._unsent -= gone
            self._whole_at = 0.0

    def set_gpus(self, gpus: Iterable[GpuIdentity]) -> None:
        known = tuple(clean_gpu(gpu) for gpu in list(gpus)[:MAX_GPUS])
        if known != self.report.gpus:
            self.report = replace(self.report, gpus=known)
            self._whole_at = 0.0

    def all(self) -> tuple[Finding, ...]:
        return tuple(self._latest.values())

    def begin_again(self) -> None:
        """Schedule a full report for a new connection, on which the controller has received nothing yet."""
        self._whole_at = 0.0

    def messages(self, now: float) -> list[Message]:
        """Return the messages to send now: changes, or a full report when it is due."""
        whole = now >= self._whole_at
        checks = list(self._latest) if whole else sorted(self._unsent)
        if not whole and not checks:
            return []
        if whole:
            self._whole_at = now + WHOLE_S
        self._unsent.clear()
        names = frozenset(self._latest) if whole else None
        return _split(self.report, [self._latest[check] for check in checks], names)


def _split(report: NodeReport, findings: list[Finding], names: frozenset[str] | None) -> list[Message]:
    """Split findings into messages of limited length. The last message of a full report lists the names of all
    checks."""
    bare = replace(report, gpus=())
    groups: list[list[Finding]] = [[]]
    size = 0
    for finding in findings:
        length = len(json.dumps(findings_message(NewFindings(replace(bare, findings=(finding,))))))
        if size + length > MAX_MESSAGE and groups[-1]:
            groups.append([])
            size = 0
        groups[-1].append(finding)
        size += length
    *first, last = [tuple(group) for group in groups]
    news = [NewFindings(replace(bare, findings=group)) for group in first]
    news.append(NewFindings(replace(report if names is not None else bare, findings=last), names))
    return [findings_message(each) for each in news]


def clean(finding: Finding) -> Finding:
    """Return the finding as the controller accepts it: one printable line of limited length."""
    result = finding.result
    clean = Result(result.verdict, _line(result.text), result.remedy, _line(result.code))
    return Finding(_name(finding.check), clean, finding.at if 0 <= finding.at < 1e11 else 0.0)


def clean_gpu(gpu: GpuIdentity) -> GpuIdentity:
    return GpuIdentity(gpu.index, *(_name(text) for text in (gpu.uuid, gpu.serial, gpu.model)))


def _name(text: str) -> str:
    return "".join(c if c.isascii() and c.isprintable() and c not in '"\\' else "?" for c in text[:MAX_NAME])


def _line(text: str) -> str:
    return text[:MAX_TEXT] if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text[:MAX_TEXT])
