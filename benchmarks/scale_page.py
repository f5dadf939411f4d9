#!/usr/bin/env python3
"""Show results of scale.py as the table and the curves of docs/scale.md.

    sudo benchmarks/scale.py --json > RESULTS
    benchmarks/scale_page.py RESULTS...            prints the table
    benchmarks/scale_page.py RESULTS... --write    also writes it to docs/scale.md, and the curves to docs/images

If there are several results of one size, the worst figures are shown. Results with another node timeout than the
default get rows of their own. The page says whether hang detection was on and whether the agents reported steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import log10
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from scale import DEFAULT_GONE_S, MAX_CPU_PERCENT, MAX_MIB, MAX_ORDER_S
from table import aligned, write
from up import machine

from dalsegno.bench.picture import BLACK, GREY, Box, Label, Picture, Stroke, to_svg

DOCS = Path(__file__).resolve().parents[1] / "docs"
Figure = tuple[str, str, Callable[[float], str], str]  # key in the results, name, formatting function, limit as text
Results = dict[int, dict[str, float]]  # number of nodes -> the worst figures


def in_seconds(value: float) -> str:
    return f"{value:.2f} s"


COORDINATOR: tuple[Figure, ...] = (
    ("connected_s", "all agents connected", in_seconds, ""),
    ("formed_s", "first generation: all ready to the last order", in_seconds, ""),
    ("stopped_s", "killed worker: report to the last order to stop: the end of the generation", in_seconds, ""),
    ("ended_s", "… first order to stop to the last confirmation", in_seconds, ""),
    ("restarted_s", "killed worker: report to the last order of the next generation", in_seconds, ""),
    ("detected_s", "lost node: detected, with the default node timeout between machines, 3 s", in_seconds, ""),
    ("ordered_s", "… then the last order of the next generation", in_seconds, f"≤ {MAX_ORDER_S:g} s"),
    ("recovered_s", "… both: from the cut to the last order", in_seconds, ""),
    ("false_alarms", "false alarms", "{:.0f}".format, "0"),
    ("queries_per_s", "queries for the activity of ranks per second", "{:.0f}".format, ""),
    ("cpu_percent", "share of a core", "{:.0f} %".format, f"≤ {MAX_CPU_PERCENT:g} %"),
    ("memory_mib", "memory", "{:.0f} MiB".format, f"≤ {MAX_MIB:g} MiB"),
    ("kbytes_per_s", "bytes on the wire per second", lambda value: f"{value / 1000:.1f} MB", ""),
)
CONTROLLER: tuple[Figure, ...] = (
    ("connected_s", "all agents connected", in_seconds, ""),
    ("noticed_s", "lost node: noticed", in_seconds, ""),
    ("told_s", "… out of service in Slurm", in_seconds, ""),
    ("false_alarms", "false alarms", "{:.0f}".format, "0"),
    *COORDINATOR[-3:],
)
# With another node timeout, only these figures change.
TIMED: tuple[Figure, ...] = (
    ("detected_s", "lost node: detected", in_seconds, ""),
    ("ordered_s", "… then the last order of the next generation", in_seconds, ""),
    ("recovered_s", "… both: from the cut to the last order", in_seconds, f"≤ {MAX_ORDER_S:g} s"),
    ("false_alarms", "false alarms", "{:.0f}".format, "0"),
    *COORDINATOR[-3:],
)
PARTS = {"coordinator": COORDINATOR, "controller": CONTROLLER}
OPTIONS = ("hang_detection", "steps")  # equal in all results of the coordinator on one page
Curve = tuple[str, str, str]  # part, key of its figure, name
CURVES: tuple[tuple[str, tuple[Curve, ...]], ...] = (
    (
        "seconds",
        (
            ("coordinator", "ordered_s", "detected loss to the last order"),
            ("coordinator", "restarted_s", "killed worker to the last order"),
            ("controller", "told_s", "lost node to its drain in Slurm"),
        ),
    ),
    (
        "share of a core (%)",
        (("coordinator", "cpu_percent", "coordinator"), ("controller", "cpu_percent", "controller")),
    ),
    ("memory (MiB)", (("coordinator", "memory_mib", "coordinator"), ("controller", "memory_mib", "controller"))),
)
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37")
WIDTH, HEIGHT, PANEL, LEFT, TOP, PLOT = 900, 320, 300, 48, 40, (230, 170)


def read(files: Sequence[str]) -> list[dict[str, float]]:
    return [json.loads(line) for name in files for line in Path(name).read_text().splitlines()]


def part_of(one: Mapping[str, float]) -> str:
    """Return the part that a result belongs to; another node timeout than the default makes a part of its own."""
    if "ordered_s" not in one:
        return "controller"
    timeout_s = one.get("node_timeout_s", DEFAULT_GONE_S)
    return "coordinator" if timeout_s == DEFAULT_GONE_S else f"coordinator, node timeout {timeout_s:g} s"


def group(results: Iterable[Mapping[str, float]]) -> dict[str, Results]:
    """Return the worst figures of each part and size."""
    found: dict[str, Results] = {part: {} for part in PARTS}
    for one in results:
        worst = found.setdefault(part_of(one), {}).setdefault(int(one["nodes"]), dict(one))
        worst |= {key: max(value, worst[key]) for key, value in one.items()}
    return found


def describe_options(results: Iterable[Mapping[str, float]]) -> str:
    """Return the sentence with the options of the coordinator's results. The prose of the page must not differ."""
    used = {tuple(bool(one.get(name)) for name in OPTIONS) for one in results if "ordered_s" in one}
    if len(used) > 1:
        raise SystemExit(f"the results were measured with different options: {', '.join(OPTIONS)}")
    hang_detection, steps = next(iter(used), (False, False))
    return f"Hang detection was {'on' if hang_detection else 'off'}, and agents reported {'' if steps else 'no '}steps."


def table(found: dict[str, Results]) -> str:
    sizes = sorted({nodes for results in found.values() for nodes in results})
    rows = []
    for part in sorted(found, key=[*PARTS].__contains__, reverse=True):
        for key, name, shown, limit in PARTS.get(part, TIMED):
            values = [found[part].get(nodes, {}).get(key) for nodes in sizes]
            cells = ["" if value is None else shown(value) for value in values]
            rows.append([f"{part}: {name}", *cells, limit])
    return aligned(["nodes", *(f"{nodes:,}" for nodes in sizes), "required at 4,096"], rows)


def draw(found: dict[str, Results]) -> Picture:
    shapes: list[Box | Stroke | Label] = [Box(0, 0, WIDTH, HEIGHT, "#ffffff")]
    for place, (title, curves) in enumerate(CURVES):
        shapes += panel(LEFT + place * PANEL, title, [(name, points(found, *figure)) for *figure, name in curves])
    return Picture(WIDTH, HEIGHT, tuple(shapes))


def points(found: dict[str, Results], part: str, key: str) -> list[tuple[int, float]]:
    return [(nodes, results[key]) for nodes, results in sorted(found[part].items())]


def panel(left: float, title: str, curves: Sequence[tuple[str, list[tuple[int, float]]]]) -> list[Box | Stroke | Label]:
    """Return one plot over the number of nodes, on a logarithmic axis."""
    width, height = PLOT
    sizes = [nodes for _, each in curves for nodes, _ in each]
    low, high = log10(min(sizes)), log10(max(sizes))
    highest = max(value for _, each in curves for _, value in each)
    top = next(unit for unit in (1, 2, 4, 20, 40, 100, 200, 400, 1000) if unit >= highest)

    def at(nodes: int, value: float) -> tuple[float, float]:
        return left + (log10(nodes) - low) / ((high - low) or 1) * width, TOP + height * (1 - value / top)

    shapes: list[Box | Stroke | Label] = [Label(left, TOP - 14, f"{title} over nodes")]
    for tick in range(5):
        y = TOP + height * (1 - tick / 4)
        shapes += [Stroke(((left, y), (left + width, y)), GREY), Label(left - 5, y + 4, f"{top * tick / 4:.3g}", 1.0)]
    for nodes in sorted(set(sizes)):
        shapes.append(Label(at(nodes, 0)[0], TOP + height + 16, f"{nodes:,}", 0.5))
    for number, (name, each) in enumerate(curves):
        colour = COLOURS[number]
        shapes.append(Stroke(tuple(at(*point) for point in each), colour, 2))
        shapes += [Box(x - 3, y - 3, 6, 6, colour) for x, y in (at(*point) for point in each)]
        shapes.append(Label(left, TOP + height + 40 + 18 * number, name, colour=colour))
    shapes.append(Stroke(((left, TOP), (left, TOP + height), (left + width, TOP + height)), BLACK))
    return shapes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", help="output of scale.py --json")
    parser.add_argument("--write", action="store_true", help="write the table and the curves to the documentation")
    options = parser.parse_args()
    results = read(options.results)
    found, used = group(results), describe_options(results)
    print(f"{used}\n\n{table(found)}")
    if options.write:
        measured = f"Measured on {time.strftime('%Y-%m-%d')} with {machine()}. {used}"
        write(DOCS / "scale.md", f"{measured}\n\n{table(found)}", "scale_page")
        (DOCS / "images/scale.svg").write_text(to_svg(draw(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
