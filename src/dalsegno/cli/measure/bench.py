"""`dalsegno bench`: benchmarks. `bench ddp` compares ways to average gradients, up to torch's DDP."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.interrupts import interruptible
from dalsegno.cli.measure.ranks import local_ranks, run_ranks, text_of
from dalsegno.cli.out import check_writable, json_option

if TYPE_CHECKING:
    from dalsegno.bench.ladder.ladder import LadderAsk, LadderReport
    from dalsegno.targets.base import Say

_HINT = "use `--device cpu` to run without GPUs, or a smaller --model-mb or --nproc to use less memory"


_COLLECTIVES = "bench_collectives"
ELSEWHERE = {  # maps each command to its module in this folder, imported only when called, and to its help text
    **{
        name: (_COLLECTIVES, f"Measure {name} with the flags and output of nccl-tests.")
        for name in (
            "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "alltoall", "scatter", "gather",
            "sendrecv",
        )
    },
    "pairs": ("bench_pairs", "Measure every pair of nodes, and name the bad node or link."),
    "gemm": ("bench_device", "Measure matrix products on each GPU or core, and compare them with the catalog's peak."),
    "memory": ("bench_device", "Measure the memory bandwidth of each GPU or core."),
    "storage": ("bench_storage", "Measure writes with fsync, reads and file creation on shared and local folders."),
    "launch": ("bench_launch", "Measure how long a run takes to start."),
    "build": ("bench_build", "Compile nccl-tests on a node or in a container."),
    "read": ("bench_read", "Read output of nccl-tests, plot it, and judge it by the hardware catalog."),
}  # fmt: skip


class Benchmarks(click.Group):
    """The group of all benchmarks. The module of a benchmark in ELSEWHERE is imported only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *ELSEWHERE]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in ELSEWHERE:
            return super().get_command(ctx, name)
        module = importlib.import_module(f"dalsegno.cli.measure.{ELSEWHERE[name][0]}")
        command: click.Command = module.COMMANDS[name] if hasattr(module, "COMMANDS") else module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            from difflib import get_close_matches

            near = get_close_matches(args[0], self.list_commands(ctx), 1)
            raise click.UsageError(f"no benchmark `{args[0]}`" + (f"; did you mean `{near[0]}`?" if near else ""), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Benchmarks"):
            here = [(name, command.short_help or "") for name, command in self.commands.items()]
            formatter.write_dl([*here, *((name, text) for name, (_, text) in ELSEWHERE.items())])


@click.group(cls=Benchmarks)
def command() -> None:
    """Measure collectives, nodes, devices, storage and starts, or judge the output of nccl-tests."""


@command.command(short_help="Compare ways to average gradients, from one message per parameter to torch's DDP.")
@click.option("--nproc", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes on this machine.")
@click.option(
    "--model-mb", type=click.FloatRange(0, min_open=True), default=16.0, show_default=True, help="Model size in MiB."
)
@click.option(
    "--layers", type=click.IntRange(1), default=8, show_default=True, help="Number of linear layers with biases."
)
@click.option("--batch", type=click.IntRange(1), default=64, show_default=True, help="Samples per process and step.")
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True, help="Timed steps of each variant.")
@click.option(
    "--bucket-cap-mb",
    "caps",
    default="1,5,25",
    show_default=True,
    metavar="LIST",
    help="Bucket sizes to compare, in MiB.",
)
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Device to use."
)
@click.option(
    "--timeline",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write a timeline of compute and messages as SVG.",
)
@json_option
def ddp(
    nproc: int, model_mb: float, layers: int, batch: int, steps: int, caps: str, device: str, timeline: str | None,
    json_: bool,
) -> None:  # fmt: skip
    """Measure time, messages and bytes of several ways to average gradients, and of torch's DDP.

    Starts its own processes on this machine. Under torchrun, `dalsegno run` or srun it runs as one rank instead, so
    that you can measure a cluster:

    \b
    torchrun --nproc-per-node 4 --no-python dalsegno bench ddp
    """
    from dalsegno.bench.ladder.ladder import LadderAsk, check_torch, parse_caps

    ask = LadderAsk(model_mb, layers, steps, batch, device, parse_caps(caps))
    check_torch()
    check_writable("--timeline", timeline)
    report = _measure(ask, nproc)
    if report is None:
        return
    if timeline:
        from dalsegno.bench.ladder.timeline import render_svg

        Path(timeline).write_text(render_svg(report))
    if json_:
        out.as_json(report.to_dict())
    else:
        _show(report)
    if timeline:
        out.talk(f"timeline written to {timeline}")


def _measure(ask: LadderAsk, nproc: int) -> LadderReport | None:
    """Return the report. Return None in a process that another launcher started as a rank other than 0."""
    from dalsegno.bench.ladder.ladder import world_env
    from dalsegno.hostlist import expand

    world = world_env(os.environ, first_host=lambda hosts: expand(hosts)[0])
    with out.progress() as say:
        if world is None:
            return measure_here(ask, nproc, say)
        os.environ.update(world)
        return _take_part(ask, say)


def _take_part(ask: LadderAsk, say: Say) -> LadderReport | None:
    from dalsegno.bench.ladder.ladder import make_importable

    make_importable()
    from dalsegno.bench.ladder.measure import measure

    def each_round(number: int) -> None:
        if os.environ["RANK"] == "0" and ask.progress(number):
            say(ask.progress(number))

    return measure(ask, "env://", each_round)


def _show(report: LadderReport) -> None:
    from dalsegno.bench.ladder import ladder, timeline

    out.data(f"{report.headline}\n")
    out.table(ladder.HEADERS, ladder.table_rows(report))
    for line in (*ladder.NOTES, *ladder.describe_unmeasured(report)):
        out.talk(line)
    out.data("\n" + timeline.draw(report.rungs))


def measure_here(ask: LadderAsk, processes: int, say: Say) -> LadderReport:
    from dalsegno.bench.ladder.ladder import ASK, REPORT, count_processes, make_importable, read_report

    make_importable()  # the ranks inherit the import path of this process
    say(f"starting {count_processes(processes)}")
    with tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as name, interruptible():
        folder = Path(name)
        (folder / ASK).write_text(ask.to_json())
        argv = [sys.executable, "-m", "dalsegno.bench.ladder.measure", str(folder)]
        run_ranks(local_ranks(argv, processes), folder, progress_of(folder, say), hint=_HINT)
        return read_report((folder / REPORT).read_text())


def progress_of(folder: Path, say: Say) -> Callable[[], None]:
    """Return a function that shows the ranks' progress file whenever its text has changed."""
    from dalsegno.bench.ladder.ladder import PROGRESS

    shown = [""]

    def watch() -> None:
        now = text_of(folder / PROGRESS)
        if now and now != shown[0]:
            say(now)
        shown[0] = now

    return watch
