"""Turn what the benchmarks and the nodes report into the parts of a certificate, with their verdicts. Pure.

Each function returns a `CertifiedPart`. Most of them take the values of `dalsegno bench … --json`. For a malformed
report, they raise KeyError, IndexError, TypeError or ValueError, and the caller reports the part as "not measured".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dalsegno.bench.certificate.certificate import (
    BetterFigure,
    CertifiedFigure,
    CertifiedPart,
    CertifyPart,
    PartOutcome,
)
from dalsegno.bench.collectives.pairs import is_compared, pair_of, picture_of
from dalsegno.bench.nccl.verdict import BenchLevel, size_text
from dalsegno.bench.node import devices, storage_measure
from dalsegno.bench.node.devices import DeviceResult, DeviceTest, judge_devices
from dalsegno.bench.node.storage_measure import FolderSpeed
from dalsegno.bench.plot import Curve, draw

SLOW_STORAGE = 0.5  # a node is slow if it writes at less than this share of all nodes' median speed in the same folder
LEAST_NODES = 3  # with fewer nodes, none is called slow


def _part(part: CertifyPart, level: BenchLevel, summary: str, **others: Any) -> CertifiedPart:
    return CertifiedPart(part, PartOutcome.MEASURED, level, summary, **others)


@dataclass(frozen=True)
class NodeHealth:
    """A node as Slurm and the controller see it. `failed` and `warned` are the names of checks. `failed` is None if no
    agent checks the node."""

    node: str
    state: str
    in_service: bool
    reason: str = ""
    failed: tuple[str, ...] | None = None
    warned: tuple[str, ...] = ()


def certify_health(nodes: Sequence[NodeHealth], commands: Sequence[str]) -> CertifiedPart:
    """Judge all nodes. A node out of service or a failed check means FAIL, a warning means DEGRADED.

    If nothing is wrong but some nodes have no agent, there is no verdict, because those nodes were not checked.
    """
    out = [each for each in nodes if not each.in_service]
    failed = [each for each in nodes if each.failed]
    unchecked = [each for each in nodes if each.failed is None]
    warned = [each for each in nodes if each.warned]
    findings = [f"{each.node} is {each.state}{f': {each.reason}' if each.reason else ''}" for each in out]
    findings += [f"{each.node}: failed {', '.join(each.failed or ())}" for each in failed]
    findings += [f"{each.node}: warning of {', '.join(each.warned)}" for each in warned]
    if unchecked:
        findings.append(f"no agent checks {', '.join(each.node for each in unchecked)}: only Slurm's state is known")
    level = BenchLevel.PASS
    if out or failed:
        level = BenchLevel.FAIL
    elif warned:
        level = BenchLevel.DEGRADED
    elif unchecked or not nodes:
        level = BenchLevel.UNKNOWN
    good = len(nodes) - len({each.node for each in (*out, *failed)})
    rows = tuple(
        (each.node, each.state, "not checked" if each.failed is None else ", ".join(each.failed) or "none",
         ", ".join(each.warned) or "none")
        for each in nodes
    )  # fmt: skip
    return _part(
        CertifyPart.HEALTH, level, f"{good} of {len(nodes)} nodes are in service without a failed check",
        figures=(CertifiedFigure("nodes without a fault", good, "nodes"),), findings=tuple(findings),
        head=("NODE", "STATE", "FAILED CHECKS", "WARNINGS"), rows=rows, commands=tuple(commands),
    )  # fmt: skip


def certify_versions(nodes: Mapping[str, Mapping[str, str]], commands: Sequence[str]) -> CertifiedPart:
    """Compare the software of the nodes. A difference means DEGRADED. With a single node there is no verdict."""
    names = list(dict.fromkeys(name for each in nodes.values() for name in each))
    findings = []
    for name in names:
        by_value: dict[str, list[str]] = {}
        for node, each in nodes.items():
            by_value.setdefault(each.get(name, ""), []).append(node)
        if len(by_value) > 1:
            shown = "; ".join(f"{value or 'none'} on {', '.join(where)}" for value, where in sorted(by_value.items()))
            findings.append(f"{name} differs: {shown}")
    level = BenchLevel.DEGRADED if findings else BenchLevel.PASS if len(nodes) > 1 else BenchLevel.UNKNOWN
    summary = f"{len(findings)} of {len(names)} versions differ between {len(nodes)} nodes"
    if len(nodes) < 2:
        summary = "one node: there is no other to compare with"
    rows = tuple((node, *(each.get(name) or "-" for name in names)) for node, each in nodes.items())
    return _part(
        CertifyPart.VERSIONS, level, summary, findings=tuple(findings), rows=rows, commands=tuple(commands),
        figures=(CertifiedFigure("differing versions", len(findings), "", BetterFigure.LOWER),),
        head=("NODE", *(name.upper() for name in names)),
    )  # fmt: skip


def certify_storage(
    report: Sequence[Mapping[str, Any]], commands: Sequence[str], compare_nodes: bool = True
) -> CertifiedPart:
    """Judge each folder on each node. A folder that cannot be used means FAIL, a slow node means DEGRADED.

    `compare_nodes` is false for virtual hosts. They share one disk, so none of them is slow by itself.
    """
    speeds = [FolderSpeed(**{key: value for key, value in each.items() if key != "shared"}) for each in report]
    if not speeds:
        raise ValueError("no folder was measured")
    findings = [f"{each.folder} on {each.host}: {each.error}" for each in speeds if each.error]
    failed = bool(findings)
    good = [each for each in speeds if not each.error]
    for each in good:
        same = [other.write_mb_per_s for other in good if other.folder == each.folder]
        if compare_nodes and len(same) >= LEAST_NODES and each.write_mb_per_s < SLOW_STORAGE * median(same):
            share = each.write_mb_per_s / median(same)
            findings.append(f"{each.folder} on {each.host} writes at {share:.0%} of the median of the nodes")
    level = BenchLevel.FAIL if failed else BenchLevel.DEGRADED if findings else BenchLevel.PASS
    figures = [
        CertifiedFigure(f"{name} {each.folder} {each.host}", value, unit)
        for each in good
        for name, value, unit in (
            ("write", each.write_mb_per_s, "MB/s"), ("read", each.read_mb_per_s, "MB/s"),
            ("create", each.files_per_s, "files/s"),
        )
    ]  # fmt: skip
    folders = list(dict.fromkeys(each.folder for each in speeds))
    return _part(
        CertifyPart.STORAGE, level, "; ".join([f"measured {', '.join(folders)}", *storage_measure.compare(speeds)]),
        figures=tuple(figures), findings=tuple(findings), head=storage_measure.HEADERS,
        rows=tuple(map(tuple, storage_measure.table_rows(speeds))), commands=tuple(commands),
    )  # fmt: skip


def certify_pairs(report: Mapping[str, Any], commands: Sequence[str], compare_history: bool = True) -> CertifiedPart:
    """Judge the matrix of pairs.

    The result is FAIL if a node or a link is bad. It is DEGRADED if a pair is slow only in some measurements, or if all
    pairs are slower than in earlier results. It is UNKNOWN if there is only one pair, no floor and no earlier result.

    `compare_history` is false for virtual hosts. Their results are not comparable with earlier ones, because other
    programs use the same processors.
    """
    usual = float(report["usual"])
    pairs = {pair_of(*each["nodes"]): float(each["busbw"]) for each in report["groups"] if len(each["nodes"]) == 2}
    findings = [f"bad {each['kind']} {' - '.join(map(str, each['nodes']))}" for each in report["faults"]]
    level = BenchLevel.FAIL if findings else BenchLevel.PASS
    if report["unsure"]:
        findings.append(f"slow only in some measurements: {', '.join(map(str, report['unsure']))}")
    history = report.get("history", {})
    if compare_history and history.get("slower"):
        findings.append(f"all pairs are slow: at least {history['threshold']:.3g} GB/s is expected from "
                        f"{history['results']} earlier results")  # fmt: skip
    if findings and level is BenchLevel.PASS:
        level = BenchLevel.DEGRADED
    compared = is_compared(report if compare_history else {**report, "history": {}})
    if level is BenchLevel.PASS and not compared:
        level = BenchLevel.UNKNOWN
        findings.append("one pair of nodes has nothing to compare with")
    figures = [CertifiedFigure("usual of a pair", usual, "GB/s")]
    figures += [CertifiedFigure(" - ".join(pair), value, "GB/s") for pair, value in sorted(pairs.items())]
    rows = [(" - ".join(pair), f"{value:.3g} GB/s", f"{value / usual:.0%}" if usual else "-")
            for pair, value in sorted(pairs.items(), key=lambda each: each[1])]  # fmt: skip
    summary = f"the usual bus bandwidth of a pair is {usual:.3g} GB/s; bad nodes or links: {len(report['faults'])}"
    nodes = [str(each) for each in report["nodes"]]
    return _part(
        CertifyPart.PAIRS, level, summary, figures=tuple(figures), findings=tuple(findings),
        head=("PAIR", "BUSBW", "OF USUAL"), rows=tuple(rows), commands=tuple(commands),
        pictures=(picture_of(nodes, pairs, usual),) if nodes else (),
    )  # fmt: skip


def certify_collectives(reports: Sequence[Mapping[str, Any]], commands: Sequence[str]) -> CertifiedPart:
    """Join the verdicts of several collectives. The worst one counts."""
    order = [BenchLevel.FAIL, BenchLevel.IMPOSSIBLE, BenchLevel.DEGRADED, BenchLevel.UNKNOWN, BenchLevel.PASS]
    levels = [BenchLevel(each["level"]) for each in reports]
    figures, rows, findings, curves = [], [], list[str](), []
    for each in reports:
        name = str(each["test"])
        points = {int(row["size"]): _busbw(row) for row in each["rows"] if int(row["size"]) > 0}
        curves.append(Curve(f"{name}, {each['machines']}", tuple(sorted(points.items())), each["expected"]))
        size, value = max(points.items(), key=lambda point: point[1], default=(0, 0.0))
        figures.append(CertifiedFigure(f"{name} bus bandwidth", value, "GB/s"))
        expected = "-" if each["expected"] is None else f"{float(each['expected']):.4g} GB/s"
        rows.append((name, f"{value:.4g} GB/s", size_text(size), expected, str(each["level"]), str(each["reason"])))
        if BenchLevel(each["level"]) is not BenchLevel.PASS:
            findings += [f"{name}: {hint}" for hint in each["hints"]]
    summary = ", ".join(f"{figure.name} {figure.value:.4g} GB/s" for figure in figures)
    return _part(
        CertifyPart.COLLECTIVES, min(levels, key=order.index), summary, figures=tuple(figures),
        findings=tuple(findings), head=("TEST", "BUSBW", "AT", "EXPECTED", "VERDICT", "REASON"), rows=tuple(rows),
        commands=tuple(commands), pictures=(draw(curves),),
    )  # fmt: skip


def _busbw(row: Mapping[str, Any]) -> float:
    """Return the bus bandwidth that the verdict uses: the lower one of the out-of-place and the in-place
    measurement."""
    return min(float(each["busbw"]) for each in (row["out_of_place"], row["in_place"]) if each is not None)


def certify_devices(
    report: Sequence[Mapping[str, Any]], commands: Sequence[str], low: float = devices.LOW
) -> CertifiedPart:
    """Judge all devices.

    The result is DEGRADED if a device is slower than the others of its product. Otherwise, it is UNKNOWN if there are
    too few devices of a product to compare.
    """
    results = [
        DeviceResult(**{**each["result"], "test": DeviceTest(each["result"]["test"])}) for each in report
    ]  # fmt: skip
    judged = judge_devices(results, low)
    slow = [f"{each.result.device} of {each.result.host}: {each.of_median:.0%} of the median" for each in judged
            if each.slow]  # fmt: skip
    compared = bool(judged) and all(each.compared for each in judged)
    level = BenchLevel.DEGRADED if slow else BenchLevel.PASS if compared else BenchLevel.UNKNOWN
    few = f"fewer than {devices.LEAST} devices of a kind are not compared with each other"
    findings = [*slow, *([] if compared else [few])]
    figures = [
        CertifiedFigure(f"{each.host} {each.device}", each.value, devices.UNITS[each.test]) for each in results
    ]  # fmt: skip
    return _part(
        CertifyPart.GEMM, level, f"{len(slow)} of {len(results)} devices are slow", figures=tuple(figures),
        findings=tuple(findings), head=devices.HEADERS, rows=tuple(map(tuple, devices.table_rows(judged))),
        commands=tuple(commands),
    )  # fmt: skip


def certify_container(container_s: float, plain_s: float, nodes: int, commands: Sequence[str]) -> CertifiedPart:
    figures = (
        CertifiedFigure("start in a container", container_s, "s", BetterFigure.LOWER),
        CertifiedFigure("start without", plain_s, "s", BetterFigure.LOWER),
    )
    summary = f"`true` in a container on {nodes} nodes took {container_s:.2f} s, without one {plain_s:.2f} s"
    return _part(CertifyPart.CONTAINER, BenchLevel.PASS, summary, figures=figures, commands=tuple(commands))


def certify_power_cut(report: Mapping[str, Any], commands: Sequence[str]) -> CertifiedPart:
    """Judge a drill with one power cut.

    The result is FAIL if the drill reports that the run did not survive. It is DEGRADED if the run survived, but the
    node was not seen back in service.
    """
    fault = report["faults"][0]
    figures, findings = [], []
    for name, key in (("detected", "known_s"), ("resumed", "resumed_s"), ("back in service", "returned_s")):
        if fault[key] is not None:
            figures.append(CertifiedFigure(name, float(fault[key]), "s", BetterFigure.LOWER))
    figures.append(CertifiedFigure("steps lost", float(fault["steps_lost"]), "steps", BetterFigure.LOWER))
    if report["exit_code"]:
        findings.append(f"the run ended with exit code {report['exit_code']}")
    if report["orphans"]:
        findings.append(f"processes left behind: {report['orphans']}")
    if report["exact"] is False:
        findings.append("the weights differ from those of an undisturbed run")
    if fault["returned_s"] is None:
        findings.append(f"{fault['node']} was not seen back in service")
    level = BenchLevel.PASS if report["survived"] else BenchLevel.FAIL
    if level is BenchLevel.PASS and findings:
        level = BenchLevel.DEGRADED
    resumed = f"resumed {fault['resumed_s']:.1f} s after it" if fault["resumed_s"] is not None else "did not stop"
    summary = f"the power of {fault['node']} was cut; training {resumed}, {fault['steps_lost']} steps were repeated"
    return _part(
        CertifyPart.POWER_CUT, level, summary, figures=tuple(figures), findings=tuple(findings),
        commands=tuple(commands),
    )  # fmt: skip
