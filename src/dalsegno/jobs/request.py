"""What a user asks for: a run, not yet a job. One that exists is one whose every word is safe in a command line."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from posixpath import basename

from dalsegno.errors import UsageError
from dalsegno.jobs import checks
from dalsegno.jobs.sbatch_args import check_sbatch_args
from dalsegno.jobs.values import Gpus, Nodes, parse_env_pairs, parse_module, parse_nodes

DEFAULT_SIGNAL_LEAD_S = 120  # Slurm may send it up to 60 s early, never late


class Framework(Enum):
    """Which library's variables the processes get, and who starts them."""

    TORCH = "torch"
    TENSORFLOW = "tensorflow"
    JAX = "jax"
    MPI = "mpi"
    PLAIN = "plain"

    @property
    def has_agents(self) -> bool:
        """Our run agents start the processes; else srun itself does, as its tasks."""
        return self not in (Framework.MPI, Framework.PLAIN)


@dataclass(frozen=True)
class RunRequest:
    """A run as asked for. "" and None: not asked for, so Slurm's or our own default. Raises UsageError if faulty."""

    script: str
    args: tuple[str, ...] = ()
    nodes: Nodes = Nodes(1, 1)
    nproc_per_node: int | None = None  # else one for each GPU, else 1
    gpus_per_node: Gpus = Gpus()
    cpus_per_task: int | None = None  # a task is one of the run's processes
    memory_mib: int | None = None  # of each node; 0: all of it
    spares: int = 0
    partition: str = ""  # or several, with commas
    time_limit_s: int | None = None  # UNLIMITED_S: none at all
    account: str = ""
    qos: str = ""
    constraint: str = ""
    exclude: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    venv: str = ""
    conda: str = ""  # prefix of the environment
    name: str = ""
    detach: bool = False
    max_restarts: int = 3
    preload: tuple[str, ...] = ()
    no_preload: bool = False
    fresh: bool = False
    framework: Framework = Framework.TORCH
    hang_timeout_s: int | None = None  # 0: off; None: from the steps that the training library reports
    signal_lead_s: int = DEFAULT_SIGNAL_LEAD_S
    chdir: str = ""
    output: str = ""  # folder in which the run gets its own
    sbatch_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_words(self)
        _check_numbers(self)
        _check_choices(self)

    @property
    def processes_per_node(self) -> int:
        return self.nproc_per_node or self.gpus_per_node.count or 1

    @property
    def label(self) -> str:
        """The run's name: as given, or that of the script without what Slurm's names cannot hold."""
        stem = basename(self.script).rpartition(".")[0] or basename(self.script)
        safe = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in stem)[:40]
        return self.name or safe.strip("-") or "run"


def _check_words(request: RunRequest) -> None:
    if not request.script:
        raise UsageError("there is no script to run", hint="name it last: `dalsegno run --nodes 4 train.py --lr 0.1`")
    if request.name:
        checks.check_name(request.name)
    if request.constraint:
        checks.check_constraint(request.constraint)
    named = {"partition": request.partition, "account": request.account, "QOS": request.qos}
    checks.check_slurm_names({**named, "GPU type": request.gpus_per_node.type})
    checks.check_node_names(request.exclude)
    checks.check_paths((request.venv, request.conda, request.chdir, request.output))
    checks.check_arguments((request.script, *request.args, *(value for _, value in request.env)))
    parse_env_pairs(f"{name}={value}" for name, value in request.env)
    for module in request.preload:
        parse_module(module)
    check_sbatch_args(request.sbatch_args)


def _check_numbers(request: RunRequest) -> None:
    parse_nodes(f"{request.nodes.min}:{request.nodes.max}")
    some = {"nproc_per_node": request.nproc_per_node, "cpus_per_task": request.cpus_per_task}
    checks.check_counts(some, least=1)
    any_number = {
        "gpus_per_node": request.gpus_per_node.count,
        "mem": request.memory_mib,
        "spares": request.spares,
        "max_restarts": request.max_restarts,
        "time": request.time_limit_s,
        "hang_timeout": request.hang_timeout_s,
    }
    checks.check_counts(any_number, least=0)
    checks.check_signal(request.signal_lead_s, request.time_limit_s)


def _check_choices(request: RunRequest) -> None:
    if request.venv and request.conda:
        raise UsageError("a run has one Python environment: `venv` or `conda`, not both", hint="leave one out")
    if request.preload and request.no_preload:
        raise UsageError("`preload` and `no_preload` exclude each other", hint="leave one out")
    if not request.framework.has_agents and request.nodes.min != request.nodes.max:
        what = f"a run of framework {request.framework.value} cannot change its size"
        raise UsageError(what, hint=f"ask for {request.nodes.max} nodes, not {request.nodes}")
