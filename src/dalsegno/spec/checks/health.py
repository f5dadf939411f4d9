"""Names of health checks and of their thresholds: a misspelt one would change nothing, and nobody would know."""

from __future__ import annotations

from dalsegno.hardware import did_you_mean
from dalsegno.spec.check_names import CHECK_THRESHOLDS
from dalsegno.spec.checks.report import Report
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.upkeep import Check, Health


def check_health(spec: ClusterSpec, report: Report) -> None:
    for name, check in spec.health.checks.items():
        if name not in CHECK_THRESHOLDS:
            hint = did_you_mean(name, CHECK_THRESHOLDS, "`dalsegno health --list` shows them")
            report.add(spec.health, f"checks.{name}", f"there is no health check `{name}`", hint)
        else:
            _thresholds(spec.health, name, check, report)


def _thresholds(health: Health, name: str, check: Check, report: Report) -> None:
    known = CHECK_THRESHOLDS[name]
    for threshold in check.thresholds:
        if threshold not in known:
            what = f"health check `{name}` has no threshold `{threshold}`"
            listed = f"it has {', '.join(known)}" if known else "it has none"
            report.add(health, f"checks.{name}.thresholds.{threshold}", what, did_you_mean(threshold, known, listed))
