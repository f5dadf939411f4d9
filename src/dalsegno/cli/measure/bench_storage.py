"""`dalsegno bench storage`: writes with fsync, reads and file creation, on shared and local folders."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import Any

import click

from dalsegno.cli import out
from dalsegno.cli.measure.bench_job import WorkerProgram, job_options, needs_data, read_place, record, run_worker
from dalsegno.cli.out import finite, json_option


@click.command("storage")
@click.argument("folders", nargs=-1, type=click.Path(), metavar="[FOLDER]…")
@click.option("--size", default="256M", show_default=True, metavar="SIZE", help="Bytes to write and read per node.")
@click.option(
    "--seconds", type=click.FloatRange(0.05, 3600), default=5.0, show_default=True, callback=finite,
    help="Time limit of each measurement.",
)  # fmt: skip
@job_options
@json_option
def command(folders: tuple[str, ...], size: str, seconds: float, json_: bool, **given: Any) -> None:
    """Measure each FOLDER: writes with fsync, reads, and how many files can be created per second.

    Without FOLDER it compares the working folder with /tmp. With `--nodes`, all nodes measure at the same time, and
    ALL NODES is their sum. The file server may answer reads from its cache. Exits 1 if a folder cannot be used.

    \b
    dalsegno bench storage /fsx /scratch
    dalsegno bench storage /fsx /tmp --nodes 8
    """
    from dalsegno.bench.collectives.collectives import parse_bytes
    from dalsegno.bench.job import BenchMeasurement
    from dalsegno.bench.node.storage_measure import HEADERS, compare, read_speeds, table_rows

    wanted = [os.path.abspath(each) for each in folders] or [os.getcwd(), "/tmp"]
    order = {"folders": wanted, "size": parse_bytes(size, "--size", least=1), "seconds": seconds}
    place = read_place(given)
    if not place.in_slurm and place.nproc is None:
        place = read_place({**given, "nproc": 1})
    worker = WorkerProgram("bench-storage", [json.dumps(order)], "storage", needs_torch=False, all_ranks=True)
    with out.progress() as say:
        say(f"measuring {', '.join(wanted)}")
        done = run_worker(worker, place, lambda line: None)
    if done is None:
        return
    speeds = read_speeds(needs_data(done.text, "the measurement"))
    for each in speeds:
        if not each.error:
            detail = {"fstype": each.fstype, "read_mb_per_s": each.read_mb_per_s, "files_per_s": each.files_per_s}
            kind = f"storage {each.folder}"
            record(done.history, BenchMeasurement(time.time(), kind, each.write_mb_per_s, "MB/s", (each.host,), detail))
    if json_:
        out.as_json([{**asdict(each), "shared": each.shared} for each in speeds])
    else:
        out.table(HEADERS, table_rows(speeds))
        for line in compare(speeds):
            out.talk(line)
    failed = [each for each in speeds if each.error]
    for each in failed:
        out.error(f"{each.folder} on {each.host}: {each.error}")
    if failed:
        raise click.exceptions.Exit(1)
