"""Node health: the checks, the code that runs them, and the reports that a node sends to the controller."""

from dalsegno.health.messages import BadReport, Finding, GpuIdentity, NodeReport, parse_report, report_message
from dalsegno.health.result import Remedy, Result, Verdict, failed, passed, unknown, warned

__all__ = [
    "BadReport",
    "Finding",
    "GpuIdentity",
    "NodeReport",
    "Remedy",
    "Result",
    "Verdict",
    "failed",
    "parse_report",
    "passed",
    "report_message",
    "unknown",
    "warned",
]
