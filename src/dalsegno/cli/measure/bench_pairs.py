"""`dalsegno bench pairs`: measure every pair of nodes, draw a heat map, and name the bad node or link."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dalsegno.cli import out
from dalsegno.cli.measure.bench_job import (
    WorkerProgram,
    earlier,
    needs_data,
    node_options,
    read_place,
    record,
    run_worker,
)
from dalsegno.cli.out import check_writable, finite, json_option
from dalsegno.errors import UsageError

if TYPE_CHECKING:
    from dalsegno.runs.submit.plan import RunPlan


@click.command("pairs")
@click.option("--size", default="64M", show_default=True, metavar="SIZE", help="Size of the all-reduce.")
@click.option(
    "--seconds", type=click.FloatRange(0.05, 600), default=1.0, show_default=True, callback=finite,
    help="Time for each measurement.",
)  # fmt: skip
@click.option(
    "--low", type=click.FloatRange(0.05, 1.0), default=0.7, show_default=True, callback=finite,
    help="A pair is slow below this share of the usual bandwidth.",
)  # fmt: skip
@click.option(
    "--floor", type=click.FloatRange(0), default=0.0, callback=finite,
    help="Bus bandwidth in GB/s that every pair must reach.",
)  # fmt: skip
@click.option(
    "--bisect", is_flag=True, help="Halve the slow group instead of measuring every pair. Faster with many nodes."
)
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Device to use."
)
@click.option("--svg", type=click.Path(dir_okay=False), metavar="FILE", help="Write the heat map as SVG.")
@node_options
@json_option
def command(
    size: str, seconds: float, low: float, floor: float, bisect: bool, device: str, svg: str | None, json_: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Measure an all-reduce of every pair of nodes, and name the bad node or link.

    All pairs are measured in one job. Pairs without a common node run at the same time, so that N nodes take N - 1
    rounds. A node is bad if more than half of its pairs are slow. A link is bad if its two nodes are slow only with
    each other. Exits 1 if a node or link is bad, or if all pairs are slower than in earlier measurements.

    \b
    dalsegno bench pairs --nodes 16 --gpus-per-node 8
    dalsegno bench pairs --nodes 64 --gpus-per-node 8 --bisect
    """
    from dalsegno.bench.collectives.collectives import parse_bytes
    from dalsegno.bench.job import BenchMeasurement

    place = read_place(given)
    if place.nodes < 2:
        raise UsageError("`bench pairs` needs at least two nodes of a cluster", hint="add `--nodes N`")
    check_writable("--svg", svg)
    count = parse_bytes(size, "--size", least=1)
    settings = {"size": count, "seconds": seconds, "bisect": bisect, "low": low, "device": device}
    worker = WorkerProgram(
        "bench-pairs", [json.dumps(settings)], "pairs",
        hint="use `--device cpu` to run without GPUs; `--venv PATH` names a Python with torch",
    )  # fmt: skip
    with out.progress() as say:
        done = run_worker(worker, place, lambda line: say(_progress(line)))
    if done is None:
        return
    lines = [json.loads(line) for line in needs_data(done.text, "`bench pairs`").splitlines() if line.startswith("{")]
    report = conclude(lines, low, max(floor, vendor_floor(done.plan, count)))
    nodes = tuple(report["nodes"])
    backend = next((line["backend"] for line in lines if "backend" in line), "")
    detail = {"bytes": count, "bisected": bisect, "nodes": len(nodes), "backend": backend}
    report["history"] = compare_with_history(report["usual"], earlier(done.history, "pairs", detail))
    record(done.history, BenchMeasurement(time.time(), "pairs", report["usual"], "GB/s", nodes, detail))
    if svg:
        _write_svg(report, svg)
    if json_:
        out.as_json(report)
    else:
        _show(report)
    if report["faults"] or report["unsure"] or report["history"]["slower"]:
        raise click.exceptions.Exit(1)


def vendor_floor(plan: RunPlan | None, size: int) -> float:
    """Return the bus bandwidth in GB/s below which a pair of these nodes is slow by the hardware catalog. Return 0.0
    if the catalog has no figure, or if the message is small."""
    from dalsegno.bench.nccl.limits import find_bound, find_expectation
    from dalsegno.bench.nccl.machines import BenchMachines
    from dalsegno.bench.nccl.table import NcclTest
    from dalsegno.bench.nccl.verdict import DEGRADED_SHARE, LARGE_BYTES
    from dalsegno.hardware import find_instance, gpu_of

    if plan is None or not plan.instance or size < LARGE_BYTES or not plan.job.gpus.count:
        return 0.0
    instance = find_instance(plan.instance)
    machines = BenchMachines(2, plan.shape.nproc_per_node, instance, gpu_of(instance))
    bound = find_bound(NcclTest.ALL_REDUCE, machines)
    expected = find_expectation(NcclTest.ALL_REDUCE, machines, bound) if bound else None
    return DEGRADED_SHARE * expected.busbw if expected else 0.0


def compare_with_history(usual: float, before: Sequence[float]) -> dict[str, Any]:
    """Return a comparison of the usual bandwidth in this measurement with earlier results of the same cluster.

    The cluster is slower than before if the bandwidth is below the `history_threshold` of the earlier results.
    """
    from dalsegno.bench.nccl.verdict import history_threshold

    threshold = history_threshold(before)
    slower = threshold is not None and usual < threshold
    return {"results": len(before), "threshold": threshold, "slower": slower}


def _progress(line: str) -> str:
    try:
        found = json.loads(line)
        return f"{', '.join(found['group'])}: {found['gbytes_per_s']:.3g} GB/s"
    except (ValueError, KeyError, TypeError):
        return "measuring"


def conclude(lines: Sequence[Mapping[str, Any]], low: float, floor: float) -> dict[str, Any]:
    """Return the report from the lines that rank 0 printed."""
    from dalsegno.bench.collectives.pairs import judge_pairs, pair_of

    nodes = [str(node) for line in lines for node in line.get("nodes", ())]
    groups = {tuple(line["group"]): float(line["gbytes_per_s"]) for line in lines if "group" in line}
    found = next((line for line in lines if "faults" in line), None)
    measured = {pair_of(*group): value for group, value in groups.items() if len(group) == 2}
    verdict = judge_pairs(measured, low, floor)
    faults: list[dict[str, Any]]
    faults = [{"kind": each.kind.value, "nodes": list(each.nodes), "share": each.share} for each in verdict.faults]
    if found is not None:
        kinds = {1: "node", 2: "link"}
        faults = [{"kind": kinds[len(each)], "nodes": each, "share": None} for each in found["faults"]]
    return {
        "nodes": nodes,
        "unit": "GB/s",
        "usual": float(found["usual"]) if found else verdict.usual,
        "groups": [{"nodes": list(group), "busbw": value} for group, value in groups.items()],
        "faults": faults,
        "unsure": list(found["unsure"]) if found else [],
        "bisected": found is not None,
        "floor": floor,
    }


def _write_svg(report: Mapping[str, Any], file: str) -> None:
    from dalsegno.bench.collectives.pairs import pair_of, picture_of
    from dalsegno.bench.picture import to_svg

    measured = {pair_of(*each["nodes"]): each["busbw"] for each in report["groups"] if len(each["nodes"]) == 2}
    Path(file).write_text(to_svg(picture_of(report["nodes"], measured, report["usual"])), encoding="utf-8")


def _show(report: Mapping[str, Any]) -> None:
    from dalsegno.bench.collectives.pairs import PairFault, PairFaultKind, draw_matrix, is_compared, pair_of

    usual = report["usual"]
    if report["bisected"]:
        rows = [
            [", ".join(each["nodes"]), f"{each['busbw']:.3g}", f"{each['busbw'] / usual:.0%}"]
            for each in report["groups"]
        ]
        out.table(["NODES", "SLOWEST PAIR (GB/s)", "OF USUAL"], rows)
    else:
        measured = {pair_of(*each["nodes"]): each["busbw"] for each in report["groups"]}
        for line in draw_matrix(report["nodes"], measured, usual):
            out.data(line)
    what = "bandwidth" if report["bisected"] else "bus bandwidth"
    out.data(f"\nusual {what} of a pair: {usual:.3g} GB/s")
    for each in report["faults"]:
        fault = PairFault(PairFaultKind(each["kind"]), tuple(each["nodes"]), each["share"] or 0.0)
        out.data(f"bad {fault}" if each["share"] is not None else f"bad {each['kind']} {' - '.join(each['nodes'])}")
    if report["unsure"]:
        out.data(f"sometimes slow, or without other nodes to compare with: {', '.join(report['unsure'])}")
    history = report["history"]
    if history["slower"]:
        out.data(
            f"all pairs are slow: at least {history['threshold']:.3g} GB/s is expected from"
            f" {history['results']} earlier results"
        )
    elif not is_compared(report):
        out.data("no verdict: one pair of nodes has nothing to compare with")
        out.advise("set `--floor GB/S` to the bus bandwidth that the pair must reach, or measure more nodes")
    elif not report["faults"] and not report["unsure"]:
        out.data("no bad node or link")
    elif any(each["kind"] == "node" for each in report["faults"]):
        node = next(each["nodes"][0] for each in report["faults"] if each["kind"] == "node")
        out.talk(f"next: `dalsegno health --node {node}`; to use the others: `--exclude {node}`")
