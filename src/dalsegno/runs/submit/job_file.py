"""Read a job file, `job.yaml`. It has the same options as `dalsegno run`. Errors about one setting name its line."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.errors import Problem, SpecError, UsageError
from dalsegno.runs.submit.options import OPTIONS, make_request
from dalsegno.runs.submit.request import RunRequest
from dalsegno.runs.submit.values import shown

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from dalsegno.spec.document import Document

import shlex
from collections.abc import Callable
from typing import Annotated

from pydantic import PlainValidator, create_model
from pydantic_core import PydanticCustomError

from dalsegno.runs.submit.options import Option, ValueKind
from dalsegno.runs.submit.values import parse_env_pairs, parse_words
from dalsegno.spec.section import Section, show

_MAX_BYTES = 1024 * 1024
_EXAMPLE = "a job file is a mapping: `script: train.py`, `nodes: 4`"
_FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)")
_FIELDS = {option.word: option.target for option in OPTIONS}
_SYNONYMS = {  # name in Slurm, torchrun or another tool -> name here
    "walltime": "time",
    "time_limit": "time",
    "ntasks_per_node": "nproc_per_node",
    "gpus": "gpus_per_node",
    "gres": "gpus_per_node",
    "memory": "mem",
    "nnodes": "nodes",
    "num_nodes": "nodes",
    "job_name": "name",
    "workdir": "chdir",
    "command": "script",
    "environment": "env",
    "queue": "partition",
}


def load_job(path: str | os.PathLike[str], over: Mapping[str, object] | None = None) -> RunRequest:
    """Return the request in the file at `path`. Fields in `over` take precedence."""
    name = os.fspath(path)
    text = _read(name)
    try:
        return parse_job(text, name, over)
    except SpecError as faults:
        raise SpecError([*faults.problems, *_missing_script(text, name)]) from None


def _missing_script(text: str, filename: str) -> list[Problem]:
    """Return a problem if the script does not exist, so that it is reported together with the other errors."""
    from dalsegno.spec.document import Table, read_document

    document = read_document(text, filename)
    data = document.data if isinstance(document.data, Table) else {}
    script, folder = data.get("script"), data.get("chdir") or "."
    if not (isinstance(script, str) and isinstance(folder, str)) or not script.endswith(".py"):
        return []  # not checked: a program that is not a Python script may be in the PATH
    if Path(folder, script).exists():
        return []
    hint = f"no such file in {Path(folder).resolve()}"
    return [document.problem(f"script {shown(script)} not found", ("script",), hint)]


def parse_job(text: str, filename: str = "job.yaml", over: Mapping[str, object] | None = None) -> RunRequest:
    """Return the request in the text of a job file. Raise SpecError with all problems in the file."""
    fields = job_fields(text, filename)
    script, args = str(fields.pop("script")), fields.pop("args", ())
    try:
        return make_request(script, args, fields, over or {})
    except UsageError as fault:
        raise SpecError([Problem(_as_keys(fault.what), filename, _as_keys(fault.hint))]) from None


def _as_keys(text: str) -> str:
    """Write the options in the text as in a job file: `cpus_per_task` instead of `--cpus-per-task`."""
    return _FLAG.sub(lambda found: found[1].replace("-", "_"), text)


def job_fields(text: str, filename: str = "job.yaml") -> dict[str, Any]:
    """Return the fields of a request that the file sets, including `script` and `args`."""
    from dalsegno.spec.document import Table, read_document

    document = read_document(text, filename)
    if not isinstance(document.data, Table):
        raise SpecError([Problem("this file contains no job", filename, _EXAMPLE)])
    found = _validated(document)
    if document.problems:
        raise SpecError(sorted(document.problems, key=lambda problem: problem.line))
    return found


def _validated(document: Document) -> dict[str, Any]:
    """Return the fields that the file sets. Add errors to the document's problems."""
    from pydantic import ValidationError

    # `x-…` keys are the user's own, for anchors. `key:` without a value is treated as absent.
    given = {key: value for key, value in document.data.items() if not key.startswith("x-") and value is not None}
    try:
        job = JobFile.model_validate(given)
    except ValidationError as refused:
        document.problems += [_problem(error, document) for error in refused.errors(include_url=False)]
        return {}
    return {_FIELDS.get(key, key): getattr(job, key) for key in given}


def _problem(error: ErrorDetails, document: Document) -> Problem:
    from dalsegno.spec.load import describe_error
    from dalsegno.spec.section import hint_unknown

    key, kind = str(error["loc"][0]), error["type"]
    if kind == "extra_forbidden":
        meant = _SYNONYMS.get(key.lower().replace("-", "_"))
        hint = f"did you mean `{meant}`?" if meant else hint_unknown(JobFile, (), key)
        return document.problem(f"a job file has no setting {shown(key)}", (key,), hint)
    if kind == "missing":
        return document.problem(f"a job file needs `{key}`", (), f"add `{key}: train.py`")
    if kind == USAGE:
        return document.problem(f"`{key}`: {error['ctx']['what']}", (key,), error["ctx"]["hint"])
    what, hint = describe_error(error, (key,), document.data, JobFile)
    return document.problem(what, (key,), hint)


def _read(name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        what = f"the file cannot be read: {error.strerror or error}"
        raise SpecError([Problem(what, name, "name a job file (`job.yaml`) or an sbatch script")]) from None
    if len(raw) > _MAX_BYTES:
        raise SpecError([Problem("the file is larger than 1 MiB", name, "check that this is a job file")])
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SpecError([Problem("the file is not UTF-8 text", name, _EXAMPLE)]) from None


# The pydantic model, which is generated from the table of options and uses the command line's parsers


USAGE = "usage"  # the error type under which pydantic reports a parser's UsageError
_QUOTES = "put it in quotes: YAML converts numbers and yes/no"
# option whose list is not joined with commas -> how it is joined into one string
_JOIN: dict[str, Callable[[list[str]], str]] = {"sbatch_args": shlex.join}


def _text(value: object) -> str:
    """Return a string or integer as text.

    Raise UsageError for other types, because YAML changes `0.10`, `1e-4` and `yes`.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise UsageError(f"{show(value)} is not text", hint=_QUOTES)


def _arguments(value: object) -> tuple[str, ...]:
    return tuple(_text(each) for each in value) if isinstance(value, list) else parse_words(_text(value))


def _variables(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise UsageError(f"{show(value)} is not a mapping of variables", hint="write `NAME: value` lines below it")
    return parse_env_pairs(f"{name}={_text(given)}" for name, given in value.items())


def _reader(option: Option) -> Callable[[object], object]:
    """Return a function that parses an option's YAML value with the command line's parser."""
    if option.kind is ValueKind.MAPPING:
        return _variables
    if option.kind is ValueKind.LIST:
        return lambda value: option.parse(_joined(option, value) if isinstance(value, list) else _text(value))
    return lambda value: option.parse(_text(value))


def _joined(option: Option, words: list[object]) -> str:
    return _JOIN.get(option.word, ",".join)([_text(each) for each in words])


def _value(read: Callable[[object], object]) -> Any:
    def check(value: object) -> object:
        try:
            return read(value)
        except UsageError as fault:
            raise PydanticCustomError(USAGE, "{what}", {"what": fault.what, "hint": fault.hint}) from None

    return Annotated[object, PlainValidator(check)]


def _field(option: Option) -> tuple[Any, Any]:
    return bool if option.kind is ValueKind.FLAG else _value(_reader(option)), None


_KEYS: dict[str, Any] = {
    "script": (str, ...),
    "args": (_value(_arguments), None),
    **{option.word: _field(option) for option in OPTIONS},
}
JobFile: type[Section] = create_model("JobFile", __base__=Section, __doc__="A run described by a job file.", **_KEYS)
