"""`dalsegno bench`: benchmarks. `bench ddp` compares ways to average gradients, up to torch's DDP."""

from __future__ import annotations

import importlib
import os
import select
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.interrupts import interruptible
from dalsegno.cli.out import json_option
from dalsegno.errors import DalsegnoError, UsageError

if TYPE_CHECKING:
    from dalsegno.bench.ladder import LadderAsk, LadderReport
    from dalsegno.system.children import Child
    from dalsegno.targets.base import Say

_POLL_S = 0.5
_LAST_LINES = 12


ELSEWHERE = {  # command -> its module in `cli/`, imported only when the command is called, and what it does
    "read": ("bench_read", "Read output of nccl-tests: table, plot, and the verdict against the catalog."),
}


class Benchmarks(click.Group):
    """The group of all benchmarks, listed by what they measure."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *ELSEWHERE]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in ELSEWHERE:
            return super().get_command(ctx, name)
        command: click.Command = importlib.import_module(f"dalsegno.cli.{ELSEWHERE[name][0]}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Benchmarks"):
            here = [(name, command.short_help or "") for name, command in self.commands.items()]
            formatter.write_dl([*here, *((name, text) for name, (_, text) in ELSEWHERE.items())])


@click.group(cls=Benchmarks)
def command() -> None:
    """Run a benchmark. Everything it compares is measured in the same run."""


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
    from dalsegno.bench.ladder import LadderAsk, check_torch, parse_caps

    ask = LadderAsk(model_mb, layers, steps, batch, device, parse_caps(caps))
    check_torch()
    _check_folder(timeline)
    report = _measure(ask, nproc)
    if report is None:
        return
    if timeline:
        from dalsegno.bench.timeline import render_svg

        Path(timeline).write_text(render_svg(report))
    if json_:
        out.as_json(report.to_dict())
    else:
        _show(report)
    if timeline:
        out.talk(f"timeline written to {timeline}")


def _check_folder(timeline: str | None) -> None:
    """Raise before measuring if the timeline cannot be written, so that no result is lost."""
    folder = Path(timeline or ".").parent
    if not os.access(folder, os.W_OK):
        raise UsageError(
            f"`{timeline}` cannot be written", where="--timeline", hint=f"create the folder `{folder}` first"
        )


def _measure(ask: LadderAsk, nproc: int) -> LadderReport | None:
    """Return the report; None in a process that another launcher started as a rank other than 0."""
    from dalsegno.bench.ladder import world_env
    from dalsegno.hostlist import expand

    world = world_env(os.environ, first_host=lambda hosts: expand(hosts)[0])
    with out.progress() as say:
        if world is None:
            return measure_here(ask, nproc, say)
        os.environ.update(world)
        return _take_part(ask, say)


def _take_part(ask: LadderAsk, say: Say) -> LadderReport | None:
    from dalsegno.bench.ladder import make_importable

    make_importable()
    from dalsegno.bench.ladder_measure import measure

    def each_round(number: int) -> None:
        if os.environ["RANK"] == "0" and ask.progress(number):
            say(ask.progress(number))

    return measure(ask, "env://", each_round)


def _show(report: LadderReport) -> None:
    from dalsegno.bench import ladder, timeline

    out.data(f"{report.headline}\n")
    out.table(ladder.HEADERS, ladder.table_rows(report))
    for line in (*ladder.NOTES, *ladder.describe_unmeasured(report)):
        out.talk(line)
    out.data("\n" + timeline.draw(report.rungs))


def measure_here(ask: LadderAsk, processes: int, say: Say) -> LadderReport:
    from dalsegno.bench.ladder import ASK, REPORT, count_processes, make_importable, read_report

    make_importable()  # for the ranks too, which inherit the import path
    say(f"starting {count_processes(processes)}")
    with tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as name, interruptible():
        folder = Path(name)
        (folder / ASK).write_text(ask.to_json())
        run_ranks([_rank(folder, rank, processes) for rank in range(processes)], folder, say)
        return read_report((folder / REPORT).read_text())


@dataclass(frozen=True)
class Rank:
    """The command line and environment of one rank."""

    argv: Sequence[str]
    env: Mapping[str, str]


def run_ranks(commands: Sequence[Rank], folder: Path, say: Say) -> None:
    """Start all ranks and wait until they have ended. No rank is left running, whatever happens."""
    from dalsegno.system.children import start

    ranks: list[Child] = []
    try:
        for number, rank in enumerate(commands):
            ranks.append(start(rank.argv, rank.env, output=_log(folder, number)))
        _wait(folder, ranks, say)
    finally:
        for child in ranks:
            child.kill()
            child.close()


def _rank(folder: Path, rank: int, processes: int) -> Rank:
    from dalsegno.bench.ladder import local_env

    # The ranks import Dal Segno and torch from the same places as this process, user site-packages included.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    loopback = {} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": "lo"}
    env = {**os.environ, **local_env(rank, processes), **loopback, "PYTHONPATH": path}
    return Rank([sys.executable, "-m", "dalsegno.bench.ladder_measure", str(folder)], env)


def _wait(folder: Path, ranks: Sequence[Child], say: Say) -> None:
    """Wait until all ranks have ended. Raise at the first failure: the other ranks would wait forever."""
    from dalsegno.bench.ladder import PROGRESS

    poll, shown = select.poll(), ""
    left = {child.fd: rank for rank, child in enumerate(ranks)}
    for fd in left:
        poll.register(fd, select.POLLIN)
    while left:
        for fd, _ in poll.poll(_POLL_S * 1000):
            poll.unregister(fd)
            rank = left.pop(fd)
            _check(rank, ranks[rank].poll(), _log(folder, rank))
        now = _text(folder / PROGRESS)
        if now and now != shown:
            say(now)
        shown = now


def _check(rank: int, code: int | None, log: Path) -> None:
    if code:
        tail = "".join(f"\n  {line}" for line in _text(log).splitlines()[-_LAST_LINES:])
        raise DalsegnoError(
            f"rank {rank} ended with code {code}:{tail}",
            hint="use `--device cpu` to run without GPUs, or a smaller --model-mb or --nproc to use less memory",
        )


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""
