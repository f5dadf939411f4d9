#!/usr/bin/env python3
"""How long a cluster takes to mend itself, and whether a training survives thirty faults.

    sudo benchmarks/recovery.py            everything, about half an hour; prints a table
    sudo benchmarks/recovery.py --quick    fewer faults, a shorter soak
    sudo benchmarks/recovery.py --write    also puts the table into docs/performance.md

Six virtual hosts; a small GPT trains on four with one spare (`dalsegno drill`). A replaced virtual host boots in a
second: what is shown is our own part of it. `benchmarks/agents.py` measures 256 agents on one controller.
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

from quiet import wait_for_quiet
from stage import ROOT, Failed, Shape, Stage
from table import Row, render, write

PAGE = ROOT / "docs/performance.md"
SHAPE = Shape(6, health="auto")
BUSY = 2  # cores that are kept busy during the soak


def main() -> int:
    options = parse_options()
    if os.geteuid() != 0:
        sys.exit("needs root: without virtual hosts no power can be cut")
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
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    return parser.parse_args()


def measure(stage: Stage, quick: bool) -> Iterator[Row]:
    busy = wait_for_quiet()
    cuts = drill(stage, 2 if quick else 5, "--only", "power-off", "--no-compare")
    yield of(cuts, "power cut: known", "known_s", 1.5, busy)
    yield of(cuts, "power cut: drained", "drained_s", 2.5, busy)
    yield of(cuts, "power cut, a spare in the run: training goes on", "resumed_s", 2.5, busy)
    yield of(cuts, "power cut: replaced, validated, back in service", "returned_s", 20, busy)
    xids = drill(stage, 2 if quick else 5, "--only", "xid", "--no-compare")
    yield of(xids, "Xid 79: drained", "drained_s", 2, busy)
    yield of(xids, "Xid 79: training stands still while it moves", "resumed_s", None, busy)
    yield many(drill(stage, 6 if quick else 30, "--seed", "7"))
    yield soak(stage, 60 if quick else 600)


def drill(stage: Stage, faults: int, *words: str) -> dict[str, Any]:
    page = str(stage.home / "drill.html")
    argv = [str(ROOT / "dalsegno"), "drill", "--faults", str(faults), "--json", "--report", page, *words]
    done = subprocess.run(argv, env=stage.env, capture_output=True, text=True, check=False)
    try:
        told: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise Failed(f"the drill told nothing: {done.stderr[-500:]}") from None
    return told


def of(told: dict[str, Any], what: str, figure: str, limit_s: float | None, busy: float) -> Row:
    """A figure of all faults; one that was not seen is no figure, and said."""
    found = [each[figure] for each in told["faults"]]
    unseen = sum(each is None for each in found)
    note = f"{unseen} of {len(found)} not seen" if unseen else ""
    return Row(what, limit_s, tuple(each for each in found if each is not None), busy, note)


def many(told: dict[str, Any]) -> Row:
    count = len(told["faults"])
    facts = [
        "survived" if told["exit_code"] == 0 else f"ended with {told['exit_code']}",
        f"{told['orphans']} orphans",
        "weights bit-identical" if told["exact"] else "weights DIFFER",
        f"{told['steps_lost']} of {told['steps']} steps done again",
        f"goodput {told['share']:.0%}",
    ]
    resumed = tuple(each["resumed_s"] for each in told["faults"] if each["resumed_s"] is not None)
    what = f"{count} faults by lot in one run: training goes on"
    return Row(what, None, resumed, note="; ".join(facts), asked="all survived, 0 orphans, bit-identical")


def soak(stage: Stage, seconds: int) -> Row:
    """Nothing is broken, but the machine is busy: nothing may be done."""
    before = events(stage)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    try:
        time.sleep(seconds)
    finally:
        for each in busy:
            each.kill()
    acted = [
        event for event in events(stage)[len(before) :] if event["kind"] in ("drain", "setdown", "reboot", "replace")
    ]
    note = f"{len(acted)} nodes taken out of service in {seconds} s with {BUSY} busy cores"
    return Row("a quiet soak", None, (float(seconds),), note=note, asked="no action")


def events(stage: Stage) -> Sequence[dict[str, Any]]:
    argv = [str(ROOT / "dalsegno"), "events", "--all", "--json"]
    done = subprocess.run(argv, env=stage.env, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
