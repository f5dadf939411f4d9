#!/usr/bin/env python3
"""Measure the import of an image, compared with the usual tools, and what a container adds to the start of a step.

benchmarks/containers.py            some minutes; prints a table
benchmarks/containers.py --quick    fewer runs
benchmarks/containers.py --write    also writes the table to docs/performance.md
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator

from container_starts import start_rows
from imports import import_rows
from stage import ROOT, Failed
from table import Row, render, seconds, write

PAGE = ROOT / "docs/performance.md"


def main() -> int:
    options = parse_options()
    rows: list[Row] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # child processes end with this one
    measured = f"Measured on {time.strftime('%Y-%m-%d')} with Linux {platform.release()}, {os.cpu_count()} cores."
    try:
        for row in measure(options.quick):
            say(f"{row.what}: {', '.join(map(seconds, row.times_s)) or row.verdict}")
            rows.append(row)
    except (KeyboardInterrupt, Failed) as error:
        say(f"stopped: {str(error) or 'interrupted'}")
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    print(render(rows))
    if options.write:
        write(PAGE, f"{measured}\n\n{render(rows)}", "containers")
        say(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    parser.add_argument("--write", action="store_true", help="write the table to docs/performance.md")
    return parser.parse_args()


def measure(quick: bool) -> Iterator[Row]:
    yield from start_rows(runs=10 if quick else 40)
    yield from import_rows(runs=2 if quick else 5)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
