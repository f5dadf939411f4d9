"""The Slurm job of a benchmark: its srun command, the paths of nccl-tests, and the history of measurements. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from posixpath import basename, join
from typing import Any

from dalsegno.runs.submit.container import container_options, wrap_guard
from dalsegno.runs.submit.plan import RunPlan, slurm_options

# Folders where the AWS samples, NVIDIA's images and the OCI HPC stack keep the programs of nccl-tests.
NCCL_TESTS_FOLDERS = ("/opt/nccl-tests/build", "/workspace/nccl-tests/build", "/opt/oci-hpc/nccl-test/build")


_INSTANCE_ID = "/sys/devices/virtual/dmi/id/board_asset_tag"  # on AWS, this file contains the instance id


def nccl_tests_places(given: str, program: str, environ: Mapping[str, str]) -> list[str]:
    """Return where a program of nccl-tests may be, the most likely place first. A bare name is looked up in PATH.

    `given` is the program, its folder, or the source folder in which it was built.
    """
    if given:
        return [given] if basename(given) == program else [join(given, "build", program), join(given, program)]
    home = environ.get("NCCL_TESTS_HOME")
    own = [join(home, "build", program), join(home, program)] if home else []
    return [*own, program, *(join(folder, program) for folder in NCCL_TESTS_FOLDERS)]


def choose_program(
    places: Sequence[str], arguments: Sequence[str], otherwise: Sequence[str], module: str = ""
) -> list[str]:
    """Return a command that runs the first of these programs that exists on the node. If none exists, it runs
    `otherwise`; without `otherwise`, it fails with a message."""
    lines = [
        f"for program in {shlex.join(places)}; do",
        '  command -v "$program" >/dev/null || continue',
        f'  [ "${{SLURM_LOCALID:-0}}" != 0 ] || echo "# host $(hostname) instance $(cat {_INSTANCE_ID} 2>/dev/null)"',
        f'  exec "$program" {shlex.join(arguments)}',
        "done",
    ]
    if otherwise:
        lines.append(f"exec {shlex.join(otherwise)}")
    else:
        lines.append(f'echo "$(hostname): {basename(places[0])} was not found" >&2; exit 127')
    if module:  # only the shell's profile defines the function `module`
        return ["bash", "-lc", "\n".join([f"module load {shlex.quote(module)} || exit 1", *lines])]
    return ["sh", "-c", "\n".join(lines)]


def srun_argv(plan: RunPlan, program: Sequence[str]) -> list[str]:
    """Return the command that requests the nodes and runs the program on them, once for each process."""
    options = [option for option in slurm_options(plan.job) if not option.startswith("--comment=")]
    return [
        "srun",
        *options,
        f"--ntasks={plan.shape.max_nodes * plan.shape.nproc_per_node}",
        "--kill-on-bad-exit=1",  # otherwise the other tasks would wait forever for a failed one
        "--cpu-bind=none",
        f"--mpi={plan.mpi or 'none'}",
        "--export=ALL",
        "--input=none",
        "--unbuffered",
        *([f"--chdir={plan.request.chdir}"] if plan.request.chdir else []),
        *container_options(plan.request, plan.request.chdir, plan.launcher),
        *wrap_guard(plan.request, plan.launcher, list(program)),
    ]


# Compiling nccl-tests


def make_argv(folder: str, *, mpi: bool, homes: Mapping[str, str], jobs: int = 8) -> list[str]:
    """Return the command that compiles nccl-tests in their folder. `homes` are MPI_HOME, CUDA_HOME and NCCL_HOME."""
    given = [f"{name}={value}" for name, value in homes.items() if value]
    return ["make", f"-j{jobs}", "-C", folder, *(["MPI=1"] if mpi else []), *given]


# History: JSON lines, one per measurement, from which thresholds are derived


@dataclass(frozen=True)
class BenchMeasurement:
    """One measurement: what was measured on which nodes, and the figure that is compared with later ones."""

    at: float
    kind: str  # for example all_reduce, pairs or gemm
    value: float
    unit: str
    nodes: tuple[str, ...] = ()
    detail: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(
            {"at": self.at, "kind": self.kind, "value": self.value, "unit": self.unit, "nodes": list(self.nodes),
             "detail": dict(self.detail)}
        )  # fmt: skip


def read_history(text: str) -> list[BenchMeasurement]:
    """Return the measurements. Damaged lines, as after a full disk, are skipped."""
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
            nodes, detail = tuple(map(str, value["nodes"])), dict(value["detail"])
            at, kind, figure, unit = float(value["at"]), str(value["kind"]), float(value["value"]), str(value["unit"])
            found.append(BenchMeasurement(at, kind, figure, unit, nodes, detail))
        except (ValueError, KeyError, TypeError):
            continue
    return found
