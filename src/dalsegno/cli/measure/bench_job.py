"""Start a benchmark: as a Slurm job, as processes on this machine, or as one rank of another launcher."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dalsegno.cli import out
from dalsegno.cli.interrupts import stoppable
from dalsegno.cli.measure.ranks import (
    LineFollower,
    Rank,
    RankFailed,
    errors_of,
    local_ranks,
    log_of,
    run_ranks,
    text_of,
)
from dalsegno.cli.training.run import ONE_WORD, click_option, read_fields
from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.runs.submit.options import OPTIONS
from dalsegno.runs.submit.values import NodeCount, shown

if TYPE_CHECKING:
    from dalsegno.bench.job import BenchMeasurement
    from dalsegno.cluster import SlurmHere
    from dalsegno.runs.submit.plan import RunPlan

_Command = TypeVar("_Command", bound=Callable[..., object])
# Options that benchmarks share with `dalsegno run`. They have no short forms, because nccl-tests uses those.
_WORDS = (
    "nodes", "gpus_per_node", "nproc_per_node", "cpus_per_task", "mem", "partition", "time", "account", "qos",
    "constraint", "exclude", "env", "venv", "conda", "container_image", "container_mounts", "sbatch_args",
)  # fmt: skip
_HELP = {
    "nodes": "Nodes of a cluster. Without it, the benchmark runs on this machine.",
    "time": "Time limit: 12h, 2:00:00. Default: the partition's.",
}
JOB_OPTIONS = tuple(
    replace(each, also=(), help=_HELP.get(each.word, each.help), shows="N" if each.word == "nodes" else each.shows)
    for each in OPTIONS
    if each.word in _WORDS
)


_NODES = re.compile(r"[1-9][0-9]{0,5}")
_IN_IMAGE = "the image needs nccl-tests, or a python3 with torch; `--container-mounts SRC:DST` mounts what it lacks"


def job_options(command: _Command) -> _Command:
    """Add the options that select where a benchmark runs, for a command that takes them as `**given`."""
    nproc = click.option(
        "--nproc", type=click.IntRange(1, 64), metavar="N",
        help="Processes on this machine, without Slurm. Default: one for each GPU.",
    )  # fmt: skip
    return nproc(node_options(command))


def node_options(command: _Command) -> _Command:
    """Add the options for a job on nodes. A command that can also start several processes here uses `job_options`."""
    one_word = click.option(
        "--sbatch-arg", ONE_WORD, multiple=True, metavar="OPTION",
        help="Further option for Slurm, passed unchanged: --sbatch-arg=--reservation=bench. May be repeated.",
    )  # fmt: skip
    cluster = click.option("--cluster", "-M", metavar="NAME", help="Cluster to use, with --nodes.")
    dry_run = click.option("--dry-run", is_flag=True, help="Print the Slurm command without running it.")
    for add in [dry_run, cluster, one_word, *(click_option(each) for each in reversed(JOB_OPTIONS))]:
        command = add(command)
    return command


@dataclass(frozen=True)
class BenchPlace:
    """The place where a benchmark runs: nodes of a cluster if `fields` has nodes, else processes on this machine."""

    fields: Mapping[str, object]
    nproc: int | None = None
    cluster: str | None = None
    dry_run: bool = False

    @property
    def nodes(self) -> int:
        """Return the number of nodes; 0 without Slurm."""
        found = self.fields.get("nodes")
        return found.max if isinstance(found, NodeCount) else 0

    @property
    def in_slurm(self) -> bool:
        return "nodes" in self.fields


def read_place(given: Mapping[str, Any]) -> BenchPlace:
    """Return the place that the options of `job_options` name."""
    missing = {each.word: None for each in OPTIONS if each.word not in _WORDS}
    nproc, cluster, dry_run = given.get("nproc"), given["cluster"], given["dry_run"]
    _check_nodes(given["nodes"])
    fields = read_fields({**missing, **given})
    if "nodes" not in fields and (fields or cluster or dry_run):
        raise UsageError("without `--nodes`, a benchmark runs on this machine", hint="add `--nodes N`")
    if "nodes" in fields and nproc:
        raise UsageError(
            "`--nproc` is for this machine, `--nodes` for a cluster",
            hint="remove one of them; `--nproc-per-node` sets the processes on each node",
        )
    return BenchPlace(fields, nproc, cluster, dry_run)


def _check_nodes(text: str | None) -> None:
    """Raise an error unless the text is one number. A range such as `1:4` is for runs, which may continue on fewer
    nodes."""
    if text is not None and not _NODES.fullmatch(text):
        raise UsageError(
            f"{shown(text)} is not a fixed number of nodes", where="--nodes",
            hint="a benchmark does not change its size: write a number, such as `--nodes 4`",
        )  # fmt: skip


def is_rank() -> bool:
    """Return whether a launcher has started this process as one of several ranks."""
    from dalsegno.bench.ladder.ladder import world_env

    return world_env(os.environ, first_host=lambda hosts: "") is not None


@dataclass(frozen=True)
class WorkerProgram:
    """The program that each process runs: one of ours, or an external one such as nccl-tests if the node has it.

    `places` are the paths where the external program may be, and `place_arguments` are its arguments.
    """

    name: str
    arguments: Sequence[str]
    label: str
    places: Sequence[str] = ()
    place_arguments: Sequence[str] = ()
    module: str = ""
    only_places: bool = False
    needs_torch: bool = True
    least_ranks: int = 1
    all_ranks: bool = False  # whether all ranks print; otherwise only rank 0 does
    is_complete: Callable[[str], bool] = lambda text: False  # whether a failed program has printed all results
    hint: str = ""


@dataclass(frozen=True)
class Finished:
    """The output of a benchmark that has ended."""

    text: str
    errors: str = ""
    plan: RunPlan | None = None
    history: Path | None = field(default=None)


def run_worker(worker: WorkerProgram, place: BenchPlace, show: Callable[[str], None]) -> Finished | None:
    """Run the program on all ranks, pass rank 0's lines to `show`, and return the output. Return None after a dry
    run."""
    if place.in_slurm:
        return _in_slurm(worker, place, show)
    return _here(worker, place, show)


def _here(worker: WorkerProgram, place: BenchPlace, show: Callable[[str], None]) -> Finished:
    import sys

    from dalsegno.bench.ladder.ladder import check_torch
    from dalsegno.cluster import home
    from dalsegno.programs import user_argv

    binary = next((found for each in worker.places if (found := shutil.which(each))), "")
    if worker.only_places and not binary:
        raise UsageError(f"`{worker.places[0]}` was not found here", where="--nccl-tests", hint=worker.hint)
    processes = place.nproc or _gpus_here() or ((os.cpu_count() or 1) if worker.all_ranks else 2)
    _check_ranks(worker, processes, "--nproc 2")
    if binary:  # nccl-tests run here without MPI, so one process uses all GPUs
        commands = [Rank([binary, *worker.place_arguments, "-g", str(processes)], dict(os.environ))]
    else:
        if worker.needs_torch:
            check_torch()
        commands = local_ranks([*user_argv(sys.executable), worker.name, *worker.arguments], processes)
        port = str(_free_port())
        commands = [
            replace(each, env={**each.env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}) for each in commands
        ]
    return _run(worker, commands, show, home() / "bench" / "this-machine.jsonl")


def _check_ranks(worker: WorkerProgram, ranks: int, instead: str) -> None:
    if ranks < worker.least_ranks:
        raise UsageError(
            f"{worker.label} needs at least {worker.least_ranks} ranks, not {ranks}", hint=f"use `{instead}`"
        )


def _gpus_per_process(arguments: Sequence[str]) -> int:
    """Return the number of GPUs that the flag `-g` of nccl-tests gives to each process."""
    value = arguments[arguments.index("-g") + 1] if "-g" in arguments else "1"
    return int(value) if value.isdigit() else 1


def _gpus_here() -> int:
    """Return the number of GPUs that the driver lists in /proc; importing torch to count them would take seconds."""
    folder = Path("/proc/driver/nvidia/gpus")
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") == "" or not folder.is_dir():
        return 0
    return len(list(folder.iterdir()))


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _in_slurm(worker: WorkerProgram, place: BenchPlace, show: Callable[[str], None]) -> Finished | None:
    import shlex

    from dalsegno.bench.job import choose_program, srun_argv
    from dalsegno.cluster import find_slurm
    from dalsegno.programs import launcher, user_argv
    from dalsegno.runs.submit.container import launcher_inside
    from dalsegno.runs.submit.program import find_python, python_of, run_environment

    slurm = find_slurm(place.cluster)
    plan = plan_job(worker, place, slurm)
    request = plan.request
    ranks = plan.shape.max_nodes * plan.shape.nproc_per_node
    _check_ranks(worker, ranks * _gpus_per_process(worker.place_arguments), "--nodes 2")
    python = python_of(request, otherwise=find_python(slurm.env, "torch" if worker.needs_torch else ""))
    start = list(launcher_inside(request, launcher())) if request.container_image else user_argv(python)
    program = [*start, worker.name, *worker.arguments]
    if worker.places:
        program = choose_program(
            worker.places, worker.place_arguments, () if worker.only_places else program, worker.module
        )
    if request.container_image and not worker.only_places:
        worker = replace(worker, hint=_IN_IMAGE)
    argv = srun_argv(plan, program)
    added = {each.name: each.value for each in plan.variables}
    if place.dry_run:
        out.data(shlex.join([*(f"{name}={value}" for name, value in added.items()), *argv]))
        return None
    for each in plan.variables:
        out.talk(f"{each.name}={each.value}  for {each.required_by}: {each.reason}")
    env = {**added, **run_environment(request, slurm.env)}
    return _run(worker, [Rank(argv, env)], show, history_file(slurm), plan)


def plan_job(worker: WorkerProgram, place: BenchPlace, slurm: SlurmHere) -> RunPlan:
    """Return the plan of the job, checked against the cluster. MPI is preferred if an external program may need it."""
    from dalsegno.cli.training.submission import cluster_facts
    from dalsegno.cluster import runs_home
    from dalsegno.runs.submit.options import make_request
    from dalsegno.runs.submit.plan import plan_run
    from dalsegno.runs.submit.prepare import new_run_id

    fields = {**place.fields, "chdir": os.getcwd(), "name": f"bench-{worker.label}"}
    kinds = ("mpi", "plain") if worker.places else ("plain",)
    for framework in kinds:
        request = make_request(worker.label, (), {**fields, "framework": framework})
        try:
            facts = cluster_facts(request, slurm, runs_home())
            return plan_run(request, facts, new_run_id(request.label, lambda name: False))
        except UsageError:
            if framework == kinds[-1] or worker.only_places:
                raise
    raise AssertionError


def _run(
    worker: WorkerProgram, commands: Sequence[Rank], show: Callable[[str], None], history: Path,
    plan: RunPlan | None = None,
) -> Finished:  # fmt: skip
    cwd = plan.request.chdir if plan else "/"
    with tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as name, stoppable():
        folder = Path(name)
        follow = LineFollower(log_of(folder, 0), show)
        try:
            run_ranks(commands, folder, follow, hint=worker.hint, cwd=cwd or "/", errors_apart=True)
        except RankFailed as fault:
            follow()
            if not worker.is_complete(text_of(log_of(folder, 0))):
                raise fault
        follow()
        ranks = range(len(commands) if worker.all_ranks else 1)
        texts = ["".join(text_of(each(folder, rank)) for rank in ranks) for each in (log_of, errors_of)]
        return Finished(texts[0], texts[1], plan, history)


# History of earlier measurements


def history_file(slurm: SlurmHere) -> Path:
    """Return the file with this user's measurements of a cluster. Other users cannot write it."""
    from dalsegno.cluster import folder_of, home

    folder = folder_of(slurm.env)
    name = folder.name if folder else "slurm"
    base = home() if os.access(next(each for each in (home(), *home().parents) if each.exists()), os.W_OK) else None
    return (base or Path("~/.local/state/dalsegno").expanduser()) / "bench" / f"{name}.jsonl"


def record(history: Path | None, measured: BenchMeasurement) -> None:
    """Append a measurement. If the folder cannot be written, warn; the measurement still counts."""
    if history is None:
        return
    try:
        history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(history, flags, 0o600), "a") as file:
            file.write(measured.to_json() + "\n")
    except OSError as error:
        out.warn(f"the result was not recorded: {error}")


def earlier(history: Path | None, kind: str, detail: Mapping[str, Any]) -> list[float]:
    """Return the values of earlier measurements of the same kind with these details."""
    from dalsegno.bench.job import read_history

    if history is None or not history.exists():
        return []
    known = read_history(history.read_text(errors="replace"))
    return [
        each.value for each in known
        if each.kind == kind and all(each.detail.get(name) == value for name, value in detail.items())
    ]  # fmt: skip


def needs_data(text: str, what: str) -> str:
    """Return the text. Raise an error if the program printed nothing."""
    if not text.strip():
        raise DalsegnoError(
            f"{what} printed nothing", hint="with `--nodes`, `--dry-run` prints the srun command: run it by hand"
        )
    return text
