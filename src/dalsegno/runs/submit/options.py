"""The options of a run as one table: word, meaning, how its text is read, and the field of RunRequest it sets.

Command line, job file and variables all go by it, so that a word means the same wherever it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dalsegno.errors import UsageError
from dalsegno.runs.submit import request, values
from dalsegno.runs.submit.container import parse_mounts
from dalsegno.runs.submit.request import RunRequest, check_framework, check_sbatch_args

ENV_PREFIX = "DALSEGNO_RUN_"


class ValueKind(Enum):
    """What an option's value looks like in a job file."""

    WORD = "word"
    FLAG = "flag"  # no value on the command line
    LIST = "list"  # may be given several times
    MAPPING = "mapping"  # K=V, may be given several times


@dataclass(frozen=True)
class Option:
    """One option: `time` on the command line and in a job file is `time_limit_s` of the request."""

    word: str
    parse: Callable[[str], object]
    help: str
    field: str = ""  # "": the same word
    kind: ValueKind = ValueKind.WORD
    examples: tuple[object, ...] = ()
    also: tuple[str, ...] = ()  # Slurm's and torchrun's own spellings of the flag
    shows: str = ""  # what stands for the value in `--help`

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
    """An empty one is a variable that was not set, and not a run without a container: srun refuses it too."""
    if not text.strip():
        raise UsageError("the image's name is empty", hint="without the option the run has no container")
    return _path(text)


_path = _checked(lambda text: request.check_paths([text]))

OPTIONS = (
    Option(
        "nodes",
        values.parse_nodes,
        "Nodes, or MIN:MAX: it may go on with as few as MIN. Default: 1.",
        examples=(4, "1:4"),
        also=("-N", "--nnodes"),
        shows="N|MIN:MAX",
    ),
    Option(
        "nproc_per_node",
        values.parse_positive,
        "Processes on each node. Default: one for each GPU asked for, else one.",
        also=("--ntasks-per-node",),
        shows="N",
    ),
    Option(
        "gpus_per_node",
        values.parse_gpus,
        "GPUs of each node: 8, or h100:8. Default: none.",
        examples=(8, "h100:8"),
        shows="[TYPE:]N",
    ),
    Option(
        "cpus_per_task",
        values.parse_positive,
        "CPUs for each process. Default: its share of the node by GPUs, else one.",
        also=("-c",),
        shows="N",
    ),
    Option(
        "mem",
        values.parse_memory,
        "Memory of each node: 64G; 0: all of it. Default: as Slurm gives.",
        "memory_mib",
        examples=("64G",),
        shows="SIZE",
    ),
    Option(
        "spares",
        values.parse_count,
        "Further nodes, kept warm, that take the place of lost ones. Default: 0.",
        shows="N",
    ),
    Option(
        "partition",
        _named("partition"),
        "Slurm partition, or several with commas. Default: the cluster's.",
        also=("-p",),
        shows="NAME",
    ),
    Option(
        "time",
        values.parse_time_limit,
        "Time limit: 12h, 2:00:00; beyond the partition's own it goes on in further jobs. Default: the partition's.",
        "time_limit_s",
        examples=("2:00:00", "12h", "unlimited"),
        also=("-t",),
        shows="TIME",
    ),
    Option("account", _named("account"), "Slurm account. Default: your own.", also=("-A",), shows="NAME"),
    Option("qos", _named("QOS"), "Quality of service. Default: your account's.", also=("-q",), shows="NAME"),
    Option(
        "constraint",
        _checked(request.check_constraint),
        "Features that the nodes must have: a100&nvlink.",
        examples=("a100&nvlink",),
        also=("-C",),
        shows="FEATURES",
    ),
    Option(
        "exclude",
        values.parse_hosts,
        "Nodes not to use: gpu[3-4].",
        kind=ValueKind.LIST,
        examples=("gpu[3-4]",),
        also=("-x",),
        shows="NODES",
    ),
    Option(
        "env", values.parse_env_words, "Environment variable of the processes.", kind=ValueKind.MAPPING, shows="K=V"
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
    Option("detach", values.parse_flag, "Submit and leave; do not follow the output.", kind=ValueKind.FLAG),
    Option(
        "max_restarts",
        values.parse_count,
        "Restarts after failures of the script; a lost node costs none. Default: 3.",
        shows="N",
    ),
    Option(
        "preload",
        values.parse_modules,
        "Python modules to import once per node, ahead, beside the framework's own.",
        kind=ValueKind.LIST,
        shows="MODULE",
    ),
    Option(
        "no_preload",
        values.parse_flag,
        "Start plain processes; nothing is imported ahead. Restarts are slower, snapshots stay on their node, "
        "and torch can hang at the end of a script.",
        kind=ValueKind.FLAG,
    ),
    Option("fresh", values.parse_flag, "Start anew, whatever checkpoints there are.", kind=ValueKind.FLAG),
    Option(
        "framework",
        _checked(check_framework),
        "Whose variables the processes get: torch, tensorflow, jax, mpi or plain. Default: torch.",
        examples=("torch", "tensorflow", "jax", "mpi", "plain"),
        shows="NAME",
    ),
    Option(
        "hang_timeout",
        values.parse_seconds,
        "No step for so long (10m; off: never) is a hang: stacks are kept, then it restarts. Default: ten times the"
        " usual step, a minute at least, where steps are reported.",
        "hang_timeout_s",
        examples=("10m", "off"),
        shows="TIME",
    ),
    Option(
        "node_timeout",
        values.parse_node_timeout,
        "How long a node may be silent until it is taken to be lost. Default: $DALSEGNO_NODE_TIMEOUT, else 3.",
        "node_timeout_s",
        examples=("3", "1.5s"),
        shows="SECONDS",
    ),
    Option(
        "signal_lead",
        values.parse_seconds,
        "How long before the time limit the processes are told to save. Default: 2m.",
        "signal_lead_s",
        examples=("2m",),
        shows="TIME",
    ),
    Option("chdir", _path, "Folder to run in. Default: this one.", also=("-D",), shows="FOLDER"),
    Option(
        "output",
        _path,
        "Folder in which the run gets its own, for logs and reports. Default: $DALSEGNO_RUNS, else the state folder's.",
        shows="FOLDER",
    ),
    Option(
        "container_image",
        _image,
        "Run in this container: a .sqsh file, or a registry's image as Pyxis writes it. Its Python is the run's.",
        examples=("/fsx/pytorch.sqsh", "nvcr.io#nvidia/pytorch:24.01-py3"),
        shows="IMAGE",
    ),
    Option(
        "container_mounts",
        parse_mounts,
        "Mounts into the container, beside the run's folders and this one.",
        kind=ValueKind.LIST,
        examples=("/fsx:/fsx",),
        shows="SRC:DST[:ro]",
    ),
    Option(
        "sbatch_args",
        _sbatch_args,
        "Further options for Slurm, as they are, in one text: '--nice=10 --reservation=morning'.",
        kind=ValueKind.LIST,
        examples=("--reservation=morning",),
        shows="WORDS",
    ),
)
_BY_WORD = {option.word: option for option in OPTIONS}


def option(word: str) -> Option:
    """The option of that word, written with `-` or `_`."""
    return _BY_WORD[word.replace("-", "_")]


def parse_option(word: str, text: str) -> object:
    """The value of one option on the command line. A fault names its flag."""
    return _read(option(word), text, option(word).flag)


def options_from_env(environ: Mapping[str, str]) -> dict[str, object]:
    """Fields of a request that variables set: `DALSEGNO_RUN_NODES=1:4`. An empty one sets nothing."""
    given = [each for each in OPTIONS if environ.get(each.variable)]
    return {each.target: _read(each, environ[each.variable], each.variable) for each in given}


def _read(each: Option, text: str, where: str) -> object:
    try:
        return each.parse(text)
    except UsageError as fault:
        raise UsageError(fault.what, where=where, hint=fault.hint) from None


def make_request(script: str, args: tuple[str, ...] = (), *layers: Mapping[str, object]) -> RunRequest:
    """A request from fields in layers, weakest first. As with sbatch: file, then variables, then command line."""
    fields: dict[str, Any] = {}
    for layer in layers:
        fields.update(layer)
    return RunRequest(**{**fields, "script": script, "args": args})
