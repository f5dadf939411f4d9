"""`dalsegno bench all_reduce` and the other collectives: measure them with the flags and output of nccl-tests."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from dalsegno.cli import out
from dalsegno.cli.measure.bench_job import (
    BenchPlace,
    Finished,
    WorkerProgram,
    earlier,
    is_rank,
    job_options,
    needs_data,
    read_place,
    record,
    run_worker,
)
from dalsegno.cli.out import json_option
from dalsegno.errors import UsageError

if TYPE_CHECKING:
    from dalsegno.bench.collectives.collectives import CollectiveAsk

NAMES = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "alltoall", "scatter", "gather", "sendrecv",
)  # fmt: skip

_NO_PROGRAM = (
    "name the folder of nccl-tests with `--nccl-tests PATH`; `dalsegno bench build` compiles them. If a library is"
    " missing, add its folder with `--env LD_LIBRARY_PATH=FOLDER`"
)

# Flags that only the programs of nccl-tests support, with their defaults. A flag with its default value is ignored.
_ONLY_NCCL_TESTS = {
    "-t": "1", "-g": "1", "-m": "1", "-p": "", "-I": "0", "-K": "0", "-z": "0", "-y": "0", "-T": "0", "-G": "0",
    "-C": "0", "-R": "0", "-x": "", "-D": "0", "-V": "", "-J": "", "-S": "0", "-M": "0", "-u": "0",
}  # fmt: skip


def check_others(words: Sequence[str]) -> list[str]:
    """Return the flags that require nccl-tests, each followed by its value; raise UsageError for an unknown flag."""
    left, needed = list(words), list[str]()
    while left:
        word = left.pop(0)
        flag, value = (word[:2], word[2:]) if not word.startswith("--") else (word, "")
        if flag not in _ONLY_NCCL_TESTS:
            raise UsageError(f"no such option: {word}", hint="`dalsegno bench all_reduce --help` lists the options")
        if not value and not left:
            raise UsageError(f"`{flag}` needs a value", hint="write it as nccl-tests do: `-g 1`")
        value = value or left.pop(0)
        if value != _ONLY_NCCL_TESTS[flag]:
            needed += [flag, value]
    return needed


Option = Callable[[Callable[..., None]], Callable[..., None]]


def _value(letter: str, name: str, default: str, help: str, metavar: str | None = None) -> Option:
    return click.option(letter, name, default=default, show_default=True, metavar=metavar, help=help)


def _count(letter: str, name: str, default: int, help: str, least: int = 1) -> Option:
    return click.option(letter, name, type=click.IntRange(least), default=default, show_default=True, help=help)


def _flags(command: Callable[..., None]) -> Callable[..., None]:
    options: list[Option] = [
        _value("-b", "--minbytes", "32M", "Smallest message size.", "SIZE"),
        _value("-e", "--maxbytes", "32M", "Largest message size.", "SIZE"),
        _value("-i", "--stepbytes", "1M", "Difference between two sizes.", "SIZE"),
        _count("-f", "--stepfactor", 0, "Multiply the size by this factor each time. 0: add --stepbytes.", least=0),
        _count("-n", "--iters", 20, "Number of timed calls."),
        _count("-w", "--warmup_iters", 5, "Number of warm-up calls.", least=0),
        _count("-N", "--run_cycles", 1, "Number of repetitions of the test."),
        _count("-c", "--check", 1, "Number of calls whose results are checked.", least=0),
        _value("-o", "--op", "sum", "Reduction: sum, prod, min, max, avg or all."),
        _value("-d", "--datatype", "float", "Data type: float, half, bfloat16 …, or all."),
        _count("-r", "--root", 0, "Rank of the root.", least=0),
        click.option(
            "-a", "--average", type=click.IntRange(0, 3), default=1, show_default=True,
            help="Time to report. 0: of rank 0. Over all ranks: 1 mean, 2 minimum, 3 maximum.",
        ),
        click.option(
            "--nccl-tests", metavar="PATH", default="auto", show_default=True,
            help="Folder or program of nccl-tests. auto: use nccl-tests if a node has them. no: measure with torch.",
        ),
        click.option("--module", metavar="NAME", default="", help="Environment module that has nccl-tests."),
        click.option(
            "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
            help="Device for measurements with torch.",
        ),
        click.option("--instance", metavar="TYPE", help="Instance type of the nodes, such as p5.48xlarge."),
        json_option,
        click.option("--output", type=click.Path(dir_okay=False), metavar="FILE", help="Write the output to FILE too."),
    ]  # fmt: skip
    for add in reversed(options):
        command = add(command)
    return command


def _ask(name: str, given: dict[str, Any]) -> CollectiveAsk:
    from dalsegno.bench.collectives.collectives import CollectiveAsk, parse_bytes

    sizes = {word: parse_bytes(given.pop(word)) for word in ("minbytes", "maxbytes", "stepbytes")}
    return CollectiveAsk(
        test=name,
        min_bytes=sizes["minbytes"],
        max_bytes=sizes["maxbytes"],
        step_bytes=sizes["stepbytes"],
        step_factor=given.pop("stepfactor"),
        iters=given.pop("iters"),
        warmup_iters=given.pop("warmup_iters"),
        cycles=given.pop("run_cycles"),
        check=given.pop("check"),
        data_type=given.pop("datatype"),
        operation=given.pop("op"),
        root=given.pop("root"),
        average=given.pop("average"),
        device=given.pop("device"),
    )


def _run(name: str, others: Sequence[str], given: dict[str, Any]) -> None:
    ask = _ask(name, given)
    nccl_tests, module, output = given.pop("nccl_tests"), given.pop("module"), given.pop("output")
    instance, json_ = given.pop("instance"), given.pop("json_")
    needed = check_others(others)
    if needed and nccl_tests == "no":
        raise UsageError(
            f"`{needed[0]} {needed[1]}` needs nccl-tests", hint="remove it, or name nccl-tests with `--nccl-tests PATH`"
        )
    if is_rank():
        _take_part(ask)
        return
    place = read_place(given)
    _check(ask, place, instance, output)
    worker = _worker(ask, nccl_tests, module, needed)
    if needed and nccl_tests == "auto" and not module:
        _check_needed(needed, place, worker.places)
    if json_:
        with out.progress() as say:
            say("measuring")
            done = run_worker(worker, place, lambda line: None)
    else:
        done = run_worker(worker, place, out.data)
    if done is None:
        return
    if output:
        with open(output, "w") as file:
            file.write(done.text)
    raise SystemExit(_conclude(ask, done, instance, json_))


def _check(ask: CollectiveAsk, place: BenchPlace, instance: str | None, output: str | None) -> None:
    """Check some options before the measurement. Otherwise their errors would appear after it, or once per rank."""
    from dalsegno.bench.nccl.machines import named_instance

    if instance:
        named_instance(instance)
    out.check_writable("--output", output)
    if ask.device == "cpu":
        ask.operations("gloo")
    if place.nproc and ask.root >= place.nproc:
        raise UsageError(f"there is no rank {ask.root}", where="-r", hint=f"the ranks are 0 to {place.nproc - 1}")


def _check_needed(needed: Sequence[str], place: BenchPlace, places: Sequence[str]) -> None:
    """Raise an error if a flag needs nccl-tests, but nothing shows that the nodes have them: the job would fail on a
    node."""
    named = "NCCL_TESTS_HOME" in os.environ or "container_image" in place.fields
    if named or any(shutil.which(each) for each in places):
        return
    flag, value = needed[0], needed[1]
    instead = f"`{'--gpus-per-node' if place.in_slurm else '--nproc'} {value}`" if flag == "-g" else ""
    raise UsageError(
        f"`{flag} {value}` needs the programs of nccl-tests, which were not found", where=flag,
        hint=(f"to use {value} GPUs of each node, write {instead}; " if instead else f"remove `{flag}`; ")
        + "otherwise name nccl-tests with `--nccl-tests PATH`, or compile them with `dalsegno bench build`",
    )  # fmt: skip


def _worker(ask: CollectiveAsk, nccl_tests: str, module: str, needed: Sequence[str]) -> WorkerProgram:
    from dalsegno.bench.collectives.collectives import TESTS
    from dalsegno.bench.job import nccl_tests_places

    given = "" if nccl_tests == "auto" else nccl_tests
    places = [] if nccl_tests == "no" else nccl_tests_places(given, TESTS[ask.test].test.program, os.environ)
    only = bool(given or needed or module) and nccl_tests != "no"
    return WorkerProgram(
        name="bench-collective",
        arguments=[ask.to_json()],
        label=ask.test,
        places=places,
        place_arguments=[*ask.nccl_tests_args(), *needed],
        module=module,
        least_ranks=2 if ask.test == "sendrecv" else 1,
        only_places=only,
        is_complete=_is_complete,
        hint=_NO_PROGRAM if only else "use `--device cpu` to run without GPUs, or a smaller `-e` to use less memory",
    )


def _is_complete(text: str) -> bool:
    """Return whether the output has a verdict. Then the test has completed, even with wrong data, or has printed why it
    failed."""
    from dalsegno.bench.nccl.parse import read_tables

    return any(table.out_of_bounds is not None or table.error for table in read_tables(text))


def _take_part(ask: CollectiveAsk) -> None:
    """Measure as one rank of a launcher such as torchrun."""
    from dalsegno.bench.collectives.collective_measure import main
    from dalsegno.bench.ladder.ladder import check_torch

    check_torch()
    raise SystemExit(main([ask.to_json()]))


def _conclude(ask: CollectiveAsk, done: Finished, instance: str | None, json_: bool) -> int:
    """Record the result, print the verdict on it, and return the exit code. A missing verdict is not a failure."""
    from dalsegno.bench.job import BenchMeasurement
    from dalsegno.bench.nccl.report import MachineAsk, read_reports
    from dalsegno.bench.nccl.verdict import BenchLevel, BenchReason, judge

    known = instance or (done.plan.instance if done.plan else "") or None
    report = read_reports("output", needs_data(done.text, ask.test) + done.errors, MachineAsk(instance=known))[-1]
    ranks = report.table.listed_ranks or 0
    size = report.verdict.size
    detail = {"ranks": ranks, "size": size, "data_type": ask.data_type, "operation": ask.operation}
    before = earlier(done.history, ask.test, detail)
    report = replace(report, verdict=judge(report.table, report.verdict.machines, before, report.verdict.separate))
    verdict = report.verdict
    if verdict.busbw and verdict.reason is not BenchReason.WRONG_DATA:
        found = BenchMeasurement(time.time(), ask.test, verdict.busbw, "GB/s", report.table.hosts, detail)
        record(done.history, found)
    if json_:
        out.as_json(report.to_dict())
    first, *others = verdict.sentences()
    out.talk(f"{verdict.level.value}  {first}")
    for sentence in others:
        out.talk(f"  {sentence}")
    for hint in report.hints():
        out.advise(hint)
    return 0 if verdict.level is BenchLevel.UNKNOWN else verdict.level.exit_code


def _make(name: str) -> click.Command:
    @click.command(name, context_settings={"ignore_unknown_options": True})
    @_flags
    @job_options
    @click.argument("others", nargs=-1, type=click.UNPROCESSED, metavar="")
    def run(others: tuple[str, ...], **given: Any) -> None:
        _run(name, others, given)

    run.help = f"""Measure {name} with the flags and the output of nccl-tests' {name}_perf.

    If the nodes have nccl-tests, they run. Otherwise, torch measures: with NCCL on GPUs, with gloo on CPUs. Without
    `--nodes`, the test runs on this machine. Under torchrun or srun, the command is one rank.

    The verdict goes to standard error. Exit code: 0 PASS or no verdict, 1 FAIL, 3 DEGRADED, 4 IMPOSSIBLE.

    \b
    dalsegno bench {name} -b 8 -e 16G -f 2 --nodes 2 --gpus-per-node 8
    dalsegno bench {name} -b 1K -e 16M -f 4 --nproc 2
    """
    return run


COMMANDS = {name: _make(name) for name in NAMES}
