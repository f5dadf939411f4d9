"""The job file's keys, for pydantic: strict, with a description each, read by the very parsers of the command line."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from dalsegno.errors import UsageError
from dalsegno.jobs.options import option
from dalsegno.jobs.values import parse_env_pairs, parse_words
from dalsegno.spec.section import Section, show

USAGE = "usage"  # pydantic's name for a fault that one of our own parsers found
_QUOTES = "put it in quotes: YAML reads numbers and yes/no in its own way"


def _usage(fault: UsageError) -> PydanticCustomError:
    return PydanticCustomError(USAGE, "{what}", {"what": fault.what, "hint": fault.hint})


def _text(value: object) -> str:
    """A word of the file. Whole numbers keep their spelling; `0.10`, `1e-4` and `yes` would not."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise _usage(UsageError(f"{show(value)} is not text", hint=_QUOTES))


def _parsed(word: str) -> PlainValidator:
    def check(value: object) -> object:
        try:
            return option(word).parse(_text(value))
        except UsageError as fault:
            raise _usage(fault) from None

    return PlainValidator(check)


def _listed(join: Callable[[list[str]], str], word: str) -> PlainValidator:
    """A list of words, or all of them in one text as on the command line."""

    def check(value: object) -> object:
        try:
            return option(word).parse(join([_text(each) for each in value]) if isinstance(value, list) else _text(value))
        except UsageError as fault:
            raise _usage(fault) from None

    return PlainValidator(check)


def _arguments(value: object) -> tuple[str, ...]:
    try:
        return tuple(_text(each) for each in value) if isinstance(value, list) else parse_words(_text(value))
    except UsageError as fault:
        raise _usage(fault) from None


def _variables(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise _usage(UsageError(f"{show(value)} is not a mapping of variables", hint="write `NAME: value` below it"))
    try:
        return parse_env_pairs(f"{name}={_text(given)}" for name, given in value.items())
    except UsageError as fault:
        raise _usage(fault) from None


_WORD: dict[str, Any] = {"type": ["string", "integer"]}
_WORDS: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": _WORD}]}
_VARIABLES: dict[str, Any] = {"type": "object", "additionalProperties": _WORD}


def _schema(schema: dict[str, Any], *examples: object) -> WithJsonSchema:
    return WithJsonSchema({**schema, "examples": list(examples)})


Arguments = Annotated[object, PlainValidator(_arguments), _schema(_WORDS, "--lr 1e-4", ["--epochs", 10])]
Variables = Annotated[object, PlainValidator(_variables), _schema(_VARIABLES, {"NCCL_DEBUG": "INFO"})]


class JobFile(Section):
    """A run, as its file describes it. Every key but `script` may be left out, or given on the command line."""

    script: str = Field(description="What to run: a Python script, or with `no_preload` any program.")
    args: Arguments = Field(default=None, description="Its arguments, as a list or in one line.")
    nodes: Annotated[object, _parsed("nodes"), _schema(_WORD, 4, "1:4")] = Field(
        default=None, description="Nodes, or MIN:MAX: it may go on with MIN of them."
    )
    nproc_per_node: Annotated[object, _parsed("nproc_per_node"), _schema(_WORD, 8)] = Field(
        default=None, description="Processes on each node; else one for each GPU, else one."
    )
    gpus_per_node: Annotated[object, _parsed("gpus_per_node"), _schema(_WORD, 8, "h100:8")] = Field(
        default=None, description="GPUs of each node."
    )
    cpus_per_task: Annotated[object, _parsed("cpus_per_task"), _schema(_WORD, 12)] = Field(
        default=None, description="CPUs for each process; else its share by GPUs, else one."
    )
    mem: Annotated[object, _parsed("mem"), _schema(_WORD, "64G")] = Field(
        default=None, description="Memory of each node; 0: all of it."
    )
    spares: Annotated[object, _parsed("spares"), _schema(_WORD, 1)] = Field(
        default=None, description="Further nodes, warm, that take the place of lost ones."
    )
    partition: Annotated[object, _parsed("partition"), _schema(_WORD, "train")] = Field(
        default=None, description="Slurm partition, or several with commas."
    )
    time: Annotated[object, _parsed("time"), _schema(_WORD, "2:00:00", "12h", "unlimited")] = Field(
        default=None, description="Time limit; beyond the partition's own the run goes on in further jobs."
    )
    account: Annotated[object, _parsed("account"), _schema(_WORD)] = Field(default=None, description="Slurm account.")
    qos: Annotated[object, _parsed("qos"), _schema(_WORD)] = Field(default=None, description="Quality of service.")
    constraint: Annotated[object, _parsed("constraint"), _schema(_WORD, "a100&nvlink")] = Field(
        default=None, description="Features the nodes must have."
    )
    exclude: Annotated[object, _listed(",".join, "exclude"), _schema(_WORDS, "gpu[3-4]")] = Field(
        default=None, description="Nodes not to use."
    )
    env: Variables = Field(default=None, description="Environment variables of the processes.")
    venv: Annotated[object, _parsed("venv"), _schema(_WORD, "/home/ada/venv")] = Field(
        default=None, description="Python virtual environment to run in."
    )
    conda: Annotated[object, _parsed("conda"), _schema(_WORD)] = Field(
        default=None, description="Prefix of the conda environment to run in."
    )
    name: Annotated[object, _parsed("name"), _schema(_WORD)] = Field(
        default=None, description="Name of the run; else the script's."
    )
    detach: bool | None = Field(default=None, description="Submit and leave; do not follow the output.")
    max_restarts: Annotated[object, _parsed("max_restarts"), _schema(_WORD, 3)] = Field(
        default=None, description="Restarts after failures of the script; a lost node costs none."
    )
    preload: Annotated[object, _listed(",".join, "preload"), _schema(_WORDS, ["transformers"])] = Field(
        default=None, description="Python modules to import once per node, before the processes start."
    )
    no_preload: bool | None = Field(default=None, description="Start plain processes; nothing is imported for them.")
    fresh: bool | None = Field(default=None, description="Start anew, whatever checkpoints there are.")
    framework: Annotated[object, _parsed("framework"), _schema(_WORD, "torch", "tensorflow", "jax", "mpi", "plain")] = (
        Field(default=None, description="Whose variables the processes get.")
    )
    hang_timeout: Annotated[object, _parsed("hang_timeout"), _schema(_WORD, "10m", "off")] = Field(
        default=None, description="No step for so long is a hang: stacks are kept, then it restarts."
    )
    signal_lead: Annotated[object, _parsed("signal_lead"), _schema(_WORD, "2m")] = Field(
        default=None, description="How long before the time limit the processes are told to save."
    )
    chdir: Annotated[object, _parsed("chdir"), _schema(_WORD)] = Field(
        default=None, description="Folder to run in; else that of the command."
    )
    output: Annotated[object, _parsed("output"), _schema(_WORD)] = Field(
        default=None, description="Folder in which the run gets its own for logs and reports."
    )
    sbatch_args: Annotated[object, _listed(shlex.join, "sbatch_args"), _schema(_WORDS, ["--reservation=morning"])] = (
        Field(default=None, description="Further options for Slurm, as they are.")
    )
