"""A user's request for a run. The constructor of `RunRequest` checks that every value is safe in a command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from posixpath import basename

from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.runs.coordinator.agents.liveness import MAX_GONE_S, MIN_GONE_S
from dalsegno.runs.submit.values import (
    NO_GPUS,
    ONE_NODE,
    UNLIMITED_S,
    Gpus,
    NodeCount,
    parse_env_pairs,
    parse_module,
    parse_nodes,
    shown,
)
from dalsegno.slurm.names import node_list, word

# Checking single values: each check raises UsageError if it fails


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+=:-]{0,79}", re.ASCII)
_CONSTRAINT = re.compile(r"[A-Za-z0-9\[(!][A-Za-z0-9_.,:&|*!()\[\]=-]{0,199}", re.ASCII)
_MAX_SIGNAL_LEAD_S = 65_535
MAX_ARGUMENT_BYTES = 512 << 10  # maximum size of the script's arguments as JSON: half the limit of a message


def check_name(name: str) -> None:
    """Check a run's name or id, which becomes the name of its Slurm job."""
    if not _NAME.fullmatch(name):
        hint = "use letters, digits and `._@+=:-`, starting with a letter or digit, at most 80"
        raise UsageError(f"invalid run name {shown(name)}", hint=hint)


def check_slurm_names(names: Mapping[str, str]) -> None:
    """Check Slurm names. A key is the kind of name, such as `partition`; a value is a comma-separated list, or ""."""
    try:
        for kind, given in names.items():
            for name in given.split(",") if given else ():
                word(kind, name)
    except DalsegnoError as fault:
        raise UsageError(fault.what, hint="`sinfo` and `sacctmgr show associations` list the names") from None


def check_node_names(names: Iterable[str]) -> None:
    try:
        for name in names:
            node_list(name)
    except DalsegnoError as fault:
        raise UsageError(fault.what, hint="`sinfo -N` lists the nodes") from None


def check_constraint(text: str) -> None:
    if not _CONSTRAINT.fullmatch(text):
        hint = "write features with Slurm's `&`, `|`, `*` and brackets, without spaces: `a100&nvlink`"
        raise UsageError(f"invalid constraint {shown(text)}", hint=hint)


def check_arguments(words: Iterable[str]) -> None:
    """Check arguments or environment variables, which may contain anything except zero bytes."""
    for each in words:
        if "\0" in each:
            raise UsageError(f"{shown(each)} contains a zero byte", hint="remove it")


def check_size(arguments: Sequence[str]) -> None:
    """Check that the arguments fit into the message that starts workers."""
    size = len(json.dumps(list(arguments)))
    if size > MAX_ARGUMENT_BYTES:
        what = f"the arguments of the script take {size >> 10} KiB; the limit is {MAX_ARGUMENT_BYTES >> 10} KiB"
        raise UsageError(what, hint="write them to a file and pass its path to the script")


def check_paths(paths: Iterable[str]) -> None:
    for path in paths:
        if not path.isprintable():
            hint = "use one without line breaks and other control characters"
            raise UsageError(f"{shown(path)} is not a path that Slurm accepts", hint=hint)
        if path.startswith("-"):
            raise UsageError(f"{shown(path)} looks like an option, not a path", hint="write `./` in front of it")


def check_counts(counts: Mapping[str, int | None], least: int) -> None:
    for name, count in counts.items():
        if count is not None and count < least:
            raise UsageError(f"`--{name}` cannot be {count}", hint=f"the minimum is {least}")


def check_node_timeout(seconds: float | None) -> None:
    """Check the node timeout. Below the minimum, a few lost heartbeats would cause a false alarm."""
    if seconds is not None and not MIN_GONE_S <= seconds <= MAX_GONE_S:
        hint = f"use {MIN_GONE_S:g} to {MAX_GONE_S:g} seconds"
        raise UsageError(f"invalid node timeout: {seconds:g} s", hint=hint)


def check_signal(lead_s: int, limit_s: int | None) -> None:
    """Check that the signal before the time limit is sent after the job starts, and that Slurm allows its lead time."""
    if not 0 < lead_s <= _MAX_SIGNAL_LEAD_S:
        hint = f"use 1 to {_MAX_SIGNAL_LEAD_S} seconds"
        raise UsageError(f"Slurm cannot send a signal {lead_s} s before the end", hint=hint)
    if limit_s is not None and limit_s != UNLIMITED_S and limit_s <= lead_s:
        hint = "request more time, or a smaller `--signal-lead`"
        raise UsageError(
            f"a time limit of {limit_s} s leaves no time before the signal {lead_s} s ahead of it", hint=hint
        )


# Options passed on to Slurm, except those that `dalsegno run` sets itself


_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(=.*)?", re.ASCII)

# Slurm option that `dalsegno run` sets -> our option to use instead, or ""
_RESERVED = {
    "nodes": "--nodes",
    "ntasks": "--nproc-per-node",
    "ntasks-per-node": "--nproc-per-node",
    "cpus-per-task": "--cpus-per-task",
    "gpus-per-node": "--gpus-per-node",
    "mem": "--mem",
    "time": "--time",
    "partition": "--partition",
    "account": "--account",
    "qos": "--qos",
    "constraint": "--constraint",
    "exclude": "--exclude",
    "job-name": "--name",
    "signal": "--signal-lead",
    "chdir": "--chdir",
    "output": "--output",
    "error": "--output",
    "export": "--env",
    "comment": "",
    "dependency": "",
    "no-kill": "",
    "no-shell": "",
    "open-mode": "",
    "wrap": "",
    "array": "",
    "parsable": "",
    "test-only": "",
    "wait": "",
    "input": "",
}
# Options that sbatch has and salloc lacks (Slurm 22.05 to 24.11)
_BATCH_ONLY = frozenset(
    {"batch", "export-file", "ignore-pbs", "kill-on-invalid-dep", "no-requeue", "propagate", "requeue"}
)


def check_sbatch_args(words: Iterable[str]) -> None:
    """Check that each word is a long option that `dalsegno run` does not set itself."""
    for each in words:
        name = _name(each)
        if name in _RESERVED:
            instead = _RESERVED[name]
            raise UsageError(
                f"`--{name}` is set by `dalsegno run`", hint=f"use `{instead}`" if instead else "remove it"
            )


def check_for_salloc(words: Iterable[str]) -> None:
    """Check that salloc has these options, because a run has no batch script on a cluster with a controller."""
    for each in words:
        if _name(each) in _BATCH_ONLY:
            hint = "remove it: runs on this cluster hold an allocation, not a batch job"
            raise UsageError(f"`--{_name(each)}` is for batch jobs only", hint=hint)


def _name(each: str) -> str:
    found = _OPTION.fullmatch(each)
    if not found or not each.isprintable():
        hint = "write `--sbatch-arg=--reservation=morning`"
        raise UsageError(f"{shown(each)} is not a long option of Slurm", hint=hint)
    return found[1]


# The request as a whole


DEFAULT_SIGNAL_LEAD_S = 120  # Slurm may send the signal up to 60 s early, but never late


# framework -> whether run agents start the processes; if not, srun starts them as its tasks
FRAMEWORKS = {"torch": True, "tensorflow": True, "jax": True, "mpi": False, "plain": False}


@dataclass(frozen=True)
class RunRequest:
    """A requested run. "" and None mean the default. The constructor raises UsageError if a value is invalid."""

    script: str
    args: tuple[str, ...] = ()
    nodes: NodeCount = ONE_NODE
    nproc_per_node: int | None = None  # default: one for each GPU, or 1 without GPUs
    gpus_per_node: Gpus = NO_GPUS
    cpus_per_task: int | None = None  # a task is one of the run's processes
    memory_mib: int | None = None  # memory per node; 0 means all of it
    spares: int = 0
    partition: str = ""  # one name, or several separated by commas
    time_limit_s: int | None = None  # UNLIMITED_S means no limit
    account: str = ""
    qos: str = ""
    constraint: str = ""
    exclude: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    venv: str = ""
    conda: str = ""  # prefix of the conda environment
    name: str = ""
    detach: bool = False
    max_restarts: int = 3
    preload: tuple[str, ...] = ()
    no_preload: bool = False
    fresh: bool = False
    framework: str = "torch"  # the framework whose environment variables the processes get
    standby: str = "auto"  # a value of StandbyMode
    hang_timeout_s: int | None = None  # 0 means off; None means derived from the steps that the script reports
    verify_every: int = 0  # steps between two checks for silent data corruption; 0 means no checks
    node_timeout_s: float | None = None  # time until a silent node is declared lost; None means the cluster's value
    signal_lead_s: int = DEFAULT_SIGNAL_LEAD_S
    chdir: str = ""
    output: str = ""  # folder that contains the run folder
    container_image: str = ""  # image name in the notation of Pyxis
    container_mounts: tuple[str, ...] = ()  # mounts of the form SRC:DST[:FLAGS]
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
        """The run's name. If none is given, it is the script's name without characters that Slurm does not allow."""
        stem = basename(self.script).rpartition(".")[0] or basename(self.script)
        safe = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in stem)[:40]
        return self.name or safe.strip("-") or "run"


def _check_words(request: RunRequest) -> None:
    if not request.script or request.script.startswith("-"):
        what = f"{shown(request.script)} is not a script" if request.script else "no script given"
        raise UsageError(what, hint="name it after the options: `dalsegno run --nodes 4 train.py --lr 0.1`")
    if request.name:
        check_name(request.name)
    if request.constraint:
        check_constraint(request.constraint)
    named = {"partition": request.partition, "account": request.account, "QOS": request.qos}
    check_slurm_names({**named, "GPU type": request.gpus_per_node.type})
    check_node_names(request.exclude)
    check_paths((request.venv, request.conda, request.chdir, request.output, request.container_image))
    check_paths(request.container_mounts)
    check_arguments((request.script, *request.args, *(value for _, value in request.env)))
    check_size((request.script, *request.args))
    parse_env_pairs(f"{name}={value}" for name, value in request.env)
    for module in request.preload:
        parse_module(module)
    check_sbatch_args(request.sbatch_args)


def _check_numbers(request: RunRequest) -> None:
    parse_nodes(f"{request.nodes.min}:{request.nodes.max}")
    some = {"nproc-per-node": request.nproc_per_node, "cpus-per-task": request.cpus_per_task}
    check_counts(some, least=1)
    any_number = {
        "gpus-per-node": request.gpus_per_node.count,
        "mem": request.memory_mib,
        "spares": request.spares,
        "max-restarts": request.max_restarts,
        "time": request.time_limit_s,
        "hang-timeout": request.hang_timeout_s,
        "verify-every": request.verify_every,
    }
    check_counts(any_number, least=0)
    check_node_timeout(request.node_timeout_s)
    if request.framework in FRAMEWORKS and request.has_agents:
        check_signal(request.signal_lead_s, request.time_limit_s)


def check_framework(name: str) -> None:
    if name not in FRAMEWORKS:
        hint = did_you_mean(name, FRAMEWORKS, otherwise=f"the frameworks are {', '.join(FRAMEWORKS)}")
        raise UsageError(f"unknown framework {shown(name)}", hint=hint)


def _check_choices(request: RunRequest) -> None:
    check_framework(request.framework)
    if request.venv and request.conda:
        raise UsageError("`--venv` and `--conda` exclude each other", hint="remove one of them")
    if request.container_image and (request.venv or request.conda):
        what = "a run in a container uses the image's Python, not `--venv` or `--conda`"
        raise UsageError(what, hint="remove it; `dalsegno image from-venv PATH` makes an image of an environment")
    if request.preload and request.no_preload:
        raise UsageError("`--preload` and `--no-preload` exclude each other", hint="remove one of them")
    if not request.has_agents and request.nodes.min != request.nodes.max:
        what = f"a run of framework {request.framework} cannot change its size"
        raise UsageError(what, hint=f"request {request.nodes.max} nodes, not {request.nodes}")
