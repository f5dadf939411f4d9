"""The ladder's report as rows of a table. Pure."""

from __future__ import annotations

from dalsegno.bench.ladder_report import LadderReport, RungResult, Traffic

HEADERS = ("RUNG", "STEP", "TIMES DDP", "CALLS", "MESSAGES", "SENT", "BY TCP")
NOTES = (
    "STEP: median of the slowest rank. CALLS, MESSAGES and bytes: one step of the rank that sends most.",
    "~ computed: what a ring all-reduce needs, 2(N-1) messages and 2(N-1)/N of the bytes. BY TCP: the kernel's count.",
)


def rows(report: LadderReport) -> list[list[str]]:
    return [_row(report, each) for each in report.rungs]


def _row(report: LadderReport, rung: RungResult) -> list[str]:
    if rung.why_not:
        return [rung.name, "-", "-", "-", "-", "-", "-"]
    ratio = report.ratio(rung)
    times = f"{ratio:.2f}" if ratio is not None else "-"
    return [rung.name, f"{rung.median_s * 1000:.1f} ms", times, *_traffic(rung.busiest)]


def _traffic(traffic: Traffic | None) -> list[str]:
    if traffic is None:
        return ["-"] * 4
    about = "~" if traffic.computed else ""
    by_tcp = "-" if traffic.tcp_bytes is None else mib(traffic.tcp_bytes)
    return [str(traffic.calls), f"{about}{traffic.messages}", f"{about}{mib(traffic.sent_bytes)}", by_tcp]


def mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


def why_nots(report: LadderReport) -> list[str]:
    return [f"{each.name} is not measured: {each.why_not}" for each in report.rungs if each.why_not]
