"""The table of a run's options: for each, its name, help, parser, and the field of RunRequest that it sets.

The command line, the job file and environment variables use this table, so that a name means the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dalsegno.errors import UsageError
from dalsegno.runs.submit import request, values
from dalsegno.runs.submit.container import check_mounts
from dalsegno.runs.submit.request import RunRequest, check_framework, check_sbatch_args

ENV_PREFIX = "DALSEGNO_RUN_"


class ValueKind(Enum):
    """The form of an option's value in a job file."""

    WORD = "word"
    FLAG = "flag"  # takes no value on the command line
    LIST = "list"  # the option may be given several times
    MAPPING = "mapping"  # the option has the form K=V and may be given several times


@dataclass(frozen=True)
class Option:
    """One option. `word` is its name for users; `field` is the field of RunRequest that it sets."""

    word: str
    parse: Callable[[str], object]
    help: str
    field: str = ""  # "" means the same name as `word`
    kind: ValueKind = ValueKind.WORD
    also: tuple[str, ...] = ()  # other names of the flag, from Slurm and torchrun
    shows: str = ""  # placeholder for the value in `--help`

    @property
    def target(self) -> str:
        return self.field or self.word

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.word.upper()

    @property
    def flag(self) -> str:
        return "--" + self.word.replace("_", "-")


def _checked(check: Callable[[str], None]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        check(text)
        return text

    return parse


def _named(kind: str) -> Callable[[str], str]:
    return _checked(lambda text: request.check_slurm_names({kind: text}))


def _sbatch_args(text: str) -> tuple[str, ...]:
    words = values.parse_words(text)
    check_sbatch_args(words)
    return words


def _image(text: str) -> str:
    """Parse the name of an image. Like srun, refuse an empty name, which usually comes from an unset variable."""
    if not text.strip():
        raise UsageError("the image name is empty", hint="to run without a container, remove the option")
    return _path(text)


_path = _checked(lambda text: request.check_paths([text]))

OPTIONS = (
    Option(
        "nodes",
        values.parse_nodes,
        "Nodes, or MIN:MAX to continue with as few as MIN. Default: 1.",
        also=("-N", "--nnodes"),
        shows="N|MIN:MAX",
    ),
    Option(
        "nproc_per_node",
        values.parse_positive,
        "Processes on each node. Default: one for each requested GPU, else one.",
        also=("--ntasks-per-node",),
        shows="N",
    ),
    Option(
        "gpus_per_node",
        values.parse_gpus,
        "GPUs on each node: 8, or h100:8. Default: none.",
        shows="[TYPE:]N",
    ),
    Option(
        "cpus_per_task",
        values.parse_positive,
        "CPUs for each process. Default: the GPUs' share of the node, else one.",
        also=("-c",),
        shows="N",
    ),
    Option(
        "mem",
        values.parse_memory,
        "Memory on each node: 64G; 0: all of it. Default: Slurm's.",
        "memory_mib",
        shows="SIZE",
    ),
    Option(
        "spares",
        values.parse_count,
        "Additional warm nodes that replace lost ones. Default: 0.",
        shows="N",
    ),
    Option(
        "partition",
        _named("partition"),
        "Slurm partition, or several, separated by commas. Default: the cluster's.",
        also=("-p",),
        shows="NAME",
    ),
    Option(
        "time",
        values.parse_time_limit,
        "Time limit: 12h, 2:00:00. If it exceeds the partition's limit, the run continues in further "
        "jobs. Default: the partition's.",
        "time_limit_s",
        also=("-t",),
        shows="TIME",
    ),
    Option("account", _named("account"), "Slurm account. Default: your own.", also=("-A",), shows="NAME"),
    Option("qos", _named("QOS"), "Quality of service. Default: your account's.", also=("-q",), shows="NAME"),
    Option(
        "constraint",
        _checked(request.check_constraint),
        "Features that the nodes must have: a100&nvlink.",
        also=("-C",),
        shows="FEATURES",
    ),
    Option(
        "exclude",
        values.parse_hosts,
        "Nodes not to use: gpu[3-4].",
        kind=ValueKind.LIST,
        also=("-x",),
        shows="NODES",
    ),
    Option(
        "env", values.parse_env_words, "Environment variable for the processes.", kind=ValueKind.MAPPING, shows="K=V"
    ),
    Option("venv", _path, "Python virtual environment to run in. Default: the active one.", shows="PATH"),
    Option("conda", _path, "Prefix of the conda environment to run in.", shows="PREFIX"),
    Option(
        "name",
        _checked(request.check_name),
        "Name of the run. Default: the script's.",
        also=("-J", "--job-name"),
        shows="NAME",
    ),
    Option("detach", values.parse_flag, "Submit and return; do not follow the output.", kind=ValueKind.FLAG),
    Option(
        "max_restarts",
        values.parse_count,
        "Restarts after failures of the script; lost nodes do not count. Default: 3.",
        shows="N",
    ),
    Option(
        "preload",
        values.parse_modules,
        "Python modules to import in advance, once per node, in addition to the framework's.",
        kind=ValueKind.LIST,
        shows="MODULE",
    ),
    Option(
        "no_preload",
        values.parse_flag,
        "Start plain processes and import no modules in advance. Restarts are slower, snapshots stay on their node, "
        "and torch can hang at the end of a script.",
        kind=ValueKind.FLAG,
    ),
    Option(
        "standby",
        values.parse_standby,
        "1: keep a process per rank waiting with CUDA and NCCL started, so that killed workers are replaced faster;"
        " 0: none. Default: 1 if the workers use GPUs.",
        shows="0|1",
    ),
    Option("fresh", values.parse_flag, "Start from scratch; ignore existing checkpoints.", kind=ValueKind.FLAG),
    Option(
        "framework",
        _checked(check_framework),
        "Framework whose environment variables the processes get: torch, tensorflow, jax, mpi or plain. "
        "Default: torch.",
        shows="NAME",
    ),
    Option(
        "hang_timeout",
        values.parse_seconds,
        "Time without a step that counts as a hang (10m; off: never): stacks are saved, then the run restarts. In a"
        " script that reports no steps: time without output in which no rank works. Default: ten times the median"
        " step, at least a minute, if steps are reported.",
        "hang_timeout_s",
        shows="TIME",
    ),
    Option(
        "verify_every",
        values.parse_count,
        "Check for silent data corruption every N steps, in scripts that call `verify`: ranks repeat each other's steps"
        " and compare the gradients. Default: no checks.",
        shows="N",
    ),
    Option(
        "node_timeout",
        values.parse_node_timeout,
        "Silence after which a node is declared lost. Default: $DALSEGNO_NODE_TIMEOUT, else 3.",
        "node_timeout_s",
        shows="SECONDS",
    ),
    Option(
        "signal_lead",
        values.parse_seconds,
        "Time before the time limit at which the processes are told to save. Default: 2m.",
        "signal_lead_s",
        shows="TIME",
    ),
    Option("chdir", _path, "Folder to run in. Default: this one.", also=("-D",), shows="FOLDER"),
    Option(
        "output",
        _path,
        "Folder in which the run folder is created, with logs and reports. Default: $DALSEGNO_RUNS, else in the state "
        "folder.",
        shows="FOLDER",
    ),
    Option(
        "container_image",
        _image,
        "Run in this container: a .sqsh file, or a registry image as Pyxis writes it. The run uses the image's Python.",
        shows="IMAGE",
    ),
    Option(
        "container_mounts",
        check_mounts,
        "Mounts into the container, in addition to the run folder and the working folder.",
        kind=ValueKind.LIST,
        shows="SRC:DST[:ro]",
    ),
    Option(
        "sbatch_args",
        _sbatch_args,
        "Further options for Slurm, passed unchanged, in one string: '--nice=10 --reservation=morning'.",
        kind=ValueKind.LIST,
        shows="WORDS",
    ),
)
_BY_WORD = {option.word: option for option in OPTIONS}


def option(word: str) -> Option:
    """Return the option with this name, written with `-` or `_`."""
    return _BY_WORD[word.replace("-", "_")]


def parse_option(word: str, text: str) -> object:
    """Parse the value of one option on the command line. Errors name the flag."""
    return _read(option(word), text, option(word).flag)


def options_from_env(environ: Mapping[str, str]) -> dict[str, object]:
    """Return the fields that variables such as `DALSEGNO_RUN_NODES=1:4` set. Empty variables are ignored."""
    given = [each for each in OPTIONS if environ.get(each.variable)]
    return {each.target: _read(each, environ[each.variable], each.variable) for each in given}


def _read(each: Option, text: str, where: str) -> object:
    try:
        return each.parse(text)
    except UsageError as fault:
        raise UsageError(fault.what, where=where, hint=fault.hint) from None


def make_request(script: str, args: tuple[str, ...] = (), *layers: Mapping[str, object]) -> RunRequest:
    """Return a request built from layers of fields. Later layers override earlier ones.

    Callers use sbatch's order: file, environment variables, command line.
    """
    fields: dict[str, Any] = {}
    for layer in layers:
        fields.update(layer)
    return RunRequest(**{**fields, "script": script, "args": args})
