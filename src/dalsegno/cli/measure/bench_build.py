"""`dalsegno bench build`: compile nccl-tests, on a node, in a container, or on this machine."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import click

from dalsegno.cli import out
from dalsegno.cli.interrupts import stoppable
from dalsegno.cli.measure.bench_job import BenchPlace, node_options, read_place
from dalsegno.errors import DalsegnoError, UsageError

_TIMEOUT_S = 3600.0


@click.command("build")
@click.argument("source", type=click.Path())
@click.option(
    "--into", type=click.Path(), metavar="FOLDER", help="Folder to unpack an archive in. Default: that of the archive."
)
@click.option("--mpi/--no-mpi", default=True, show_default=True, help="Build with MPI, which several nodes need.")
@click.option("--mpi-home", default="", metavar="PATH", help="Folder of MPI, such as /opt/amazon/openmpi.")
@click.option("--cuda-home", default="", metavar="PATH", help="Folder of CUDA, such as /usr/local/cuda.")
@click.option("--nccl-home", default="", metavar="PATH", help="Folder of NCCL, if the compiler does not find it.")
@click.option(
    "--jobs", "-j", type=click.IntRange(1, 256), default=8, show_default=True, help="Compilers to run at the same time."
)
@node_options
def command(
    source: str, into: str | None, mpi: bool, mpi_home: str, cuda_home: str, nccl_home: str, jobs: int, **given: Any
) -> None:
    """Compile nccl-tests from SOURCE, a folder or a tar archive, and print the folder with the programs.

    Put SOURCE on storage that all nodes mount. With `--nodes 1` it is compiled on a node, and with `--container-image`
    in a container on that node. Without `--nodes` it is compiled on this machine.

    \b
    dalsegno bench build nccl-tests-2.19.6.tar.gz --nodes 1 --cuda-home /usr/local/cuda
    dalsegno bench build ./nccl-tests --nodes 1 --container-image /fsx/pytorch.sqsh
    """
    from dalsegno.bench.job import make_argv
    from dalsegno.system.processes import LocalRunner

    place = read_place(given)
    if place.nodes > 1:
        raise UsageError("nccl-tests are compiled on one node", where="--nodes", hint="write `--nodes 1`")
    folder = _unpack(Path(source), into)
    homes = {"MPI_HOME": mpi_home, "CUDA_HOME": cuda_home, "NCCL_HOME": nccl_home}
    argv, env = make_argv(str(folder), mpi=mpi, homes=homes, jobs=jobs), dict(os.environ)
    if place.in_slurm:
        argv, env = _on_node(argv, place, folder)
    if place.dry_run:
        out.data(shlex.join(argv))
        return
    with out.progress() as say, stoppable():
        say(f"compiling {folder}")
        done = LocalRunner().run(argv, env=env, timeout_s=_TIMEOUT_S)
    programs = sorted(each.name for each in (folder / "build").glob("*_perf"))
    if done.exit_code or not programs:
        tail = "".join(f"\n  {line}" for line in (done.stdout + done.stderr).splitlines()[-15:])
        raise DalsegnoError(
            f"nccl-tests were not built (make ended with code {done.exit_code}):{tail}",
            hint="set --cuda-home, --nccl-home and --mpi-home; without MPI, use --no-mpi",
        )
    out.data(str(folder / "build"))
    out.talk(f"{len(programs)} programs; use them with `--nccl-tests {folder / 'build'}`")


def _unpack(source: Path, into: str | None) -> Path:
    """Return the folder with the Makefile. If `source` is an archive, unpack it first."""
    from dalsegno.system.processes import LocalRunner

    if not source.exists():
        raise UsageError(f"`{source}` does not exist", hint="give the folder or the tar archive of nccl-tests' source")
    folder = source.absolute()
    if source.is_file():
        listed = LocalRunner().run(["tar", "-tf", str(folder)])
        if listed.exit_code:
            raise UsageError(
                f"`{source}` is not a tar archive", hint="give a folder, or a .tar, .tar.gz or .tar.xz file"
            )
        target = Path(into).absolute() if into else folder.parent
        target.mkdir(parents=True, exist_ok=True)
        # tar refuses archive members with paths outside the target folder.
        LocalRunner().run(["tar", "-xf", str(folder), "-C", str(target), "--no-same-owner"]).checked()
        tops = {name.removeprefix("./").partition("/")[0] for name in listed.stdout.splitlines()} - {"", "."}
        folder = target / tops.pop() if len(tops) == 1 else target
    if not (folder / "Makefile").is_file():
        raise UsageError(f"`{folder}` has no Makefile", hint="give the top folder of nccl-tests' source")
    return folder


def _on_node(argv: list[str], place: BenchPlace, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the srun command that compiles on a node, and its environment."""
    from dataclasses import replace

    from dalsegno.bench.job import srun_argv
    from dalsegno.cli.measure.bench_job import WorkerProgram, plan_job
    from dalsegno.cluster import find_slurm
    from dalsegno.runs.submit.program import run_environment

    slurm = find_slurm(place.cluster)
    # run one `make`, however many GPUs are requested
    place = replace(place, fields={**place.fields, "nproc_per_node": 1})
    plan = plan_job(WorkerProgram("", (), "build"), place, slurm)
    plan = replace(plan, request=replace(plan.request, chdir=str(folder)))
    return srun_argv(plan, argv), run_environment(plan.request, slurm.env)
