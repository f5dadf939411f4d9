#!/usr/bin/env python3
"""Measure how fast a cluster recovers, and whether training survives thirty faults.

    sudo benchmarks/recovery.py            everything, about half an hour; prints a table
    sudo benchmarks/recovery.py --quick    fewer faults, a shorter soak
    sudo benchmarks/recovery.py --write    also writes the table to docs/performance.md

The cluster has six virtual hosts. A small GPT trains on four of them, with one spare (`dalsegno drill`). A replaced
virtual host boots in a second, so the times show our own part. `benchmarks/agents.py` simulates 256 agents on one
controller.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from agents import MOST_CPU_PERCENT, MOST_MIB, MOST_SEEN_S
from quiet import wait_for_quiet
from stage import ROOT, Failed, Shape, Stage
from table import Row, render, seconds, write

PAGE = ROOT / "docs/performance.md"
SHAPE = Shape(6, health="auto")
SETTLED_S = 20.0
BUSY = 2  # cores kept busy during the soak


def main() -> int:
    options = parse_options()
    if os.geteuid() != 0:
        sys.exit("needs root: power cuts need virtual hosts")
    stage, rows, code = Stage(), list[Row](), 0
    try:
        stage.up(SHAPE)
        for row in measure(stage, options.quick):
            say(f"{row.what}: {row.verdict}")
            rows.append(row)
    except (KeyboardInterrupt, Failed) as error:
        say(f"stopped: {str(error) or 'interrupted'}")
        code = 1
    finally:
        left = stage.close()
    print(render(rows))
    for thing in left:
        say(f"left behind: {thing}")
    if options.write and not code and not left:
        write(PAGE, f"Measured on {time.strftime('%Y-%m-%d')}.\n\n{render(rows)}", "recovery")
    return code or (1 if left else 0)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer faults, a shorter soak")
    parser.add_argument("--write", action="store_true", help="write the table to docs/performance.md")
    return parser.parse_args()


def measure(stage: Stage, quick: bool) -> Iterator[Row]:
    busy = wait_for_quiet()
    cuts = drill(stage, 2 if quick else 5, "--only", "power-off", "--with-spares", "--no-compare")
    yield fault_row(cuts, "power cut: detected", "known_s", 1.5, busy)
    yield fault_row(cuts, "power cut: drained", "drained_s", 2.5, busy)
    yield fault_row(cuts, "power cut, a spare in the run: training resumes", "resumed_s", 2.5, busy)
    yield fault_row(cuts, "power cut: replaced, validated, back in service", "returned_s", 20, busy)
    xids = drill(stage, 2 if quick else 5, "--only", "xid", "--with-spares", "--no-compare")
    yield fault_row(xids, "Xid 79: drained", "drained_s", 2, busy)
    yield fault_row(xids, "Xid 79: training stalls while it moves", "resumed_s", None, busy)
    yield many(drill(stage, 6 if quick else 30, "--seed", "7"))
    yield soak(stage, 60 if quick else 600)
    yield from agents(quick)


def drill(stage: Stage, faults: int, *args: str) -> dict[str, Any]:
    page = str(stage.home / "drill.html")
    argv = [str(ROOT / "dalsegno"), "drill", "--faults", str(faults), "--json", "--report", page, *args]
    done = subprocess.run(argv, env=stage.env, capture_output=True, text=True, check=False)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise Failed(f"the drill printed no report: {done.stderr[-500:]}") from None
    return report


def fault_row(report: dict[str, Any], what: str, figure: str, limit_s: float | None, busy: float) -> Row:
    """Return a row with one figure of all faults. Its note counts the faults without this figure."""
    figures = [each[figure] for each in report["faults"]]
    found = [each for each in figures if figure != "drained_s" or each != 0]  # 0: the node was already out of service
    seen = [each for each in found if each is not None]
    notes = [f"{len(found) - len(seen)} of {len(found)} not observed"] if len(seen) < len(found) else []
    notes += [f"{out} hit a node already out of service"] if (out := len(figures) - len(found)) else []
    notes += [f"worst {seconds(max(seen))}"] if seen else []
    notes += [f"{bare} without a ready spare"] if figure == "resumed_s" and (bare := without_spare(report)) else []
    return Row(what, limit_s, tuple(seen), busy, "; ".join(notes), held=len(seen) == len(found))


def without_spare(report: dict[str, Any]) -> int:
    """Return the number of faults that took a node while no spare was ready."""
    return sum(each["without_spare"] for each in report["faults"])


def many(report: dict[str, Any]) -> Row:
    count = len(report["faults"])
    facts = [
        "survived" if report["exit_code"] == 0 else f"ended with {report['exit_code']}",
        f"{report['orphans']} orphans",
        "weights bit-identical" if report["exact"] else "weights DIFFER",
        f"{report['steps_lost']} of {report['steps']} steps repeated",
        f"goodput {report['share']:.0%}",
        f"{without_spare(report)} without a ready spare",
    ]
    stopped = [each["resumed_s"] for each in report["faults"] if each["stops"]]
    resumed = tuple(each for each in stopped if each is not None)
    if len(resumed) < len(stopped):  # the other faults hit during another recovery, or after the last step
        facts.append(f"{len(stopped) - len(resumed)} of {len(stopped)} not observed separately")
    held = report["exit_code"] == 0 and report["orphans"] == 0 and report["exact"]
    what = f"{count} random faults in one run: training resumes"
    return Row(what, None, resumed, note="; ".join(facts), required="all survived, 0 orphans, bit-identical", held=held)


def soak(stage: Stage, length_s: int) -> Row:
    """Check that the controller does nothing while the machine is busy and nothing is broken."""
    before = wait_until_settled(stage)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    try:
        time.sleep(length_s)
    finally:
        for each in busy:
            each.kill()
    new = events(stage)[len(before) :]
    note = f"{len(new)} events, with {BUSY} cores busy" + "".join(f"; {each['node']} {each['text']}" for each in new)
    return Row("a soak without faults", None, (float(length_s),), note=note, required="no action", held=not new)


def wait_until_settled(stage: Stage) -> Sequence[dict[str, Any]]:
    """Wait until the last node of a drill is back and no new event comes. Return all events."""
    found, since = events(stage), time.monotonic()
    while time.monotonic() - since < SETTLED_S:
        time.sleep(1)
        if len(now := events(stage)) > len(found):
            found, since = now, time.monotonic()
    return found


def agents(quick: bool) -> Iterator[Row]:
    """Run `agents.py`: many simulated agents on one controller."""
    argv = [sys.executable, str(ROOT / "benchmarks/agents.py"), "--json"]
    argv += ["--seconds", "5", "--deaths", "2"] if quick else []
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    try:
        held = json.loads(done.stdout)
    except ValueError:
        raise Failed(f"agents.py printed no report: {done.stderr[-500:]}") from None
    required = f"≤ {MOST_CPU_PERCENT:g} % of a core, ≤ {MOST_MIB:g} MiB"
    good = held["cpu_percent"] <= MOST_CPU_PERCENT and held["memory_mib"] <= MOST_MIB and not held["false_alarms"]
    note = f"{held['cpu_percent']:.1f} % of a core, {held['memory_mib']:.0f} MiB, {held['false_alarms']} false alarms"
    what = f"{held['nodes']} agents on one controller: all connected"
    yield Row(what, None, (held["connected_s"],), note=note, required=required, held=good)
    worst = f"worst {seconds(max(held['seen_s']))}"
    yield Row("… a dead node is detected", MOST_SEEN_S, tuple(held["seen_s"]), note=worst)


def events(stage: Stage) -> Sequence[dict[str, Any]]:
    argv = [str(ROOT / "dalsegno"), "events", "--all", "--json"]
    done = subprocess.run(argv, env=stage.env, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
