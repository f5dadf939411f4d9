"""What a user asks for: a run, not yet a job. One that exists is one whose every word is safe in a command line."""

from __future__ import annotations

from dataclasses import dataclass
from posixpath import basename

from dalsegno.errors import UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.jobs import checks
from dalsegno.jobs.sbatch_args import check_sbatch_args
from dalsegno.jobs.values import NO_GPUS, ONE_NODE, Gpus, Nodes, parse_env_pairs, parse_module, parse_nodes, shown

DEFAULT_SIGNAL_LEAD_S = 120  # Slurm may send it up to 60 s early, never late


# Frameworks, and whether our run agents start the processes; else srun itself does, as its tasks.
FRAMEWORKS = {"torch": True, "tensorflow": True, "jax": True, "mpi": False, "plain": False}


@dataclass(frozen=True)
class RunRequest:
    """A run as asked for. "" and None: not asked for, so Slurm's or our own default. Raises UsageError if faulty."""

    script: str
    args: tuple[str, ...] = ()
    nodes: Nodes = ONE_NODE
    nproc_per_node: int | None = None  # else one for each GPU, else 1
    gpus_per_node: Gpus = NO_GPUS
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
    framework: str = "torch"  # whose variables the processes get
    hang_timeout_s: int | None = None  # 0: off; None: from the steps that the training library reports
    node_timeout_s: float | None = None  # until a silent node is taken to be lost; None: as the cluster says
    signal_lead_s: int = DEFAULT_SIGNAL_LEAD_S
    chdir: str = ""
    output: str = ""  # folder in which the run gets its own
    container_image: str = ""  # as Pyxis takes it
    container_mounts: tuple[str, ...] = ()  # SRC:DST[:FLAGS]
    sbatch_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_words(self)
        _check_numbers(self)
        _check_choices(self)

    @property
    def has_agents(self) -> bool:
        return FRAMEWORKS[self.framework]

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
    if not request.script or request.script.startswith("-"):
        what = f"{shown(request.script)} is not a script to run" if request.script else "there is no script to run"
        raise UsageError(what, hint="name it after the options: `dalsegno run --nodes 4 train.py --lr 0.1`")
    if request.name:
        checks.check_name(request.name)
    if request.constraint:
        checks.check_constraint(request.constraint)
    named = {"partition": request.partition, "account": request.account, "QOS": request.qos}
    checks.check_slurm_names({**named, "GPU type": request.gpus_per_node.type})
    checks.check_node_names(request.exclude)
    checks.check_paths((request.venv, request.conda, request.chdir, request.output, request.container_image))
    checks.check_paths(request.container_mounts)
    checks.check_arguments((request.script, *request.args, *(value for _, value in request.env)))
    checks.check_size((request.script, *request.args))
    parse_env_pairs(f"{name}={value}" for name, value in request.env)
    for module in request.preload:
        parse_module(module)
    check_sbatch_args(request.sbatch_args)


def _check_numbers(request: RunRequest) -> None:
    parse_nodes(f"{request.nodes.min}:{request.nodes.max}")
    some = {"nproc-per-node": request.nproc_per_node, "cpus-per-task": request.cpus_per_task}
    checks.check_counts(some, least=1)
    any_number = {
        "gpus-per-node": request.gpus_per_node.count,
        "mem": request.memory_mib,
        "spares": request.spares,
        "max-restarts": request.max_restarts,
        "time": request.time_limit_s,
        "hang-timeout": request.hang_timeout_s,
    }
    checks.check_counts(any_number, least=0)
    checks.check_node_timeout(request.node_timeout_s)
    if request.framework in FRAMEWORKS and request.has_agents:
        checks.check_signal(request.signal_lead_s, request.time_limit_s)


def check_framework(name: str) -> None:
    if name not in FRAMEWORKS:
        hint = did_you_mean(name, FRAMEWORKS, otherwise=f"there are {', '.join(FRAMEWORKS)}")
        raise UsageError(f"{shown(name)} is no framework we know", hint=hint)


def _check_choices(request: RunRequest) -> None:
    check_framework(request.framework)
    if request.venv and request.conda:
        raise UsageError("a run has one Python environment: `--venv` or `--conda`, not both", hint="leave one out")
    if request.container_image and (request.venv or request.conda):
        what = "a run in a container has the image's Python, and no `--venv` or `--conda`"
        raise UsageError(what, hint="leave it out; `dalsegno image from-venv PATH` makes an image of one")
    if request.preload and request.no_preload:
        raise UsageError("`--preload` and `--no-preload` exclude each other", hint="leave one out")
    if not request.has_agents and request.nodes.min != request.nodes.max:
        what = f"a run of framework {request.framework} cannot change its size"
        raise UsageError(what, hint=f"ask for {request.nodes.max} nodes, not {request.nodes}")
