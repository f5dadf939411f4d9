"""`dalsegno bench gemm` and `bench memory`: compare each GPU or core with the hardware catalog and with the other GPUs
or cores."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import click

from dalsegno.cli import out
from dalsegno.cli.measure.bench_job import WorkerProgram, job_options, needs_data, read_place, record, run_worker
from dalsegno.cli.out import finite, json_option

_device = click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Device to use."
)
_seconds = click.option(
    "--seconds", type=click.FloatRange(0.05, 3600), default=2.0, show_default=True, callback=finite,
    help="Time for each measurement.",
)  # fmt: skip
_low = click.option(
    "--low", type=click.FloatRange(0.05, 1.0), default=0.85, show_default=True, callback=finite,
    help="A device is slow below this share of the median of its kind.",
)  # fmt: skip


@click.command("gemm")
@click.option("--side", "-s", type=click.IntRange(16, 65536), help="Side of the matrices. Default: 8192; 1024 on CPUs.")
@click.option("--datatype", "-d", default="auto", show_default=True, help="bfloat16, half, float or double.")
@_seconds
@_low
@_device
@job_options
@json_option
def gemm(side: int | None, datatype: str, seconds: float, low: float, device: str, json_: bool, **given: Any) -> None:
    """Measure matrix products on each GPU, or on each core of machines without GPUs.

    OF PEAK compares with the hardware catalog, for bfloat16 without sparsity. A device is slow if it is much slower
    than the median of at least three devices of the same kind. Exits 1 if a device is slow.

    \b
    dalsegno bench gemm
    dalsegno bench gemm --nodes 16 --gpus-per-node 8
    """
    from dalsegno.bench.collectives.collectives import DATA_TYPES
    from dalsegno.bench.node.devices import DeviceAsk, DeviceTest
    from dalsegno.errors import UsageError

    if datatype not in ("auto", *DATA_TYPES):
        raise UsageError(f"unknown data type `{datatype}`", where="-d", hint="use bfloat16, half, float or double")
    _run(DeviceAsk(DeviceTest.GEMM, datatype, side or 0, 0, seconds, device), low, json_, given)


@click.command("memory")
@click.option("--size", metavar="SIZE", help="Bytes to copy. Default: 1G; 64M on CPUs.")
@_seconds
@_low
@_device
@job_options
@json_option
def memory(size: str | None, seconds: float, low: float, device: str, json_: bool, **given: Any) -> None:
    """Measure copies within the memory of each GPU, and between it and the host; without GPUs, copies by each core.

    Exits 1 if a device is slow, as `bench gemm` does.

    \b
    dalsegno bench memory
    dalsegno bench memory --nodes 2 --gpus-per-node 8
    """
    from dalsegno.bench.collectives.collectives import parse_bytes
    from dalsegno.bench.node.devices import DeviceAsk, DeviceTest

    copied = parse_bytes(size, "--size", least=1) if size else 0
    _run(DeviceAsk(DeviceTest.MEMORY, "auto", 0, copied, seconds, device), low, json_, given)


def _run(ask: Any, low: float, json_: bool, given: dict[str, Any]) -> None:
    from dalsegno.bench.job import BenchMeasurement
    from dalsegno.bench.node.devices import HEADERS, LEAST, UNITS, judge_devices, read_results, table_rows, without_gpu

    worker = WorkerProgram(
        "bench-device", [ask.to_json()], ask.test.value, all_ranks=True,
        hint="use `--device cpu` to run without GPUs; `--venv PATH` names a Python with torch",
    )  # fmt: skip
    place = read_place(given)
    with out.progress() as say:
        say("measuring")
        done = run_worker(worker, place, lambda line: None)
    if done is None:
        return
    judged = judge_devices(read_results(needs_data(done.text, "the measurement")), low)
    for each in judged:
        found = each.result
        detail = {"device": found.device, "product": found.product, "instance": found.instance}
        kind = f"{ask.test.value}: {found.test.value}"
        record(done.history, BenchMeasurement(time.time(), kind, found.value, UNITS[found.test], (found.host,), detail))
    if json_:
        out.as_json([{**asdict(each), "peak": each.result.peak} for each in judged])
    else:
        out.table(HEADERS, table_rows(judged))
    if "gpus_per_node" in place.fields and ask.device == "auto" and (hosts := without_gpu(judged)):
        out.warn(f"torch found no GPU on {', '.join(hosts)}: processors were measured instead")
    if not all(each.compared for each in judged):
        out.talk(f"fewer than {LEAST} devices of a kind are not compared with each other")
    slow = [each for each in judged if each.slow]
    if slow:
        names = ", ".join(f"{each.result.device} of {each.result.host}" for each in slow)
        out.talk(f"slow: {names}")
        where = f" --node {slow[0].result.host}" if place.in_slurm else ""
        out.advise(f"`dalsegno health{where}` shows throttling, clocks and errors of the device")
        raise click.exceptions.Exit(1)


COMMANDS = {"gemm": gemm, "memory": memory}
