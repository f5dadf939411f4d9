"""The job file's keys for pydantic, made from the table of options: strict, described, and read by the same parsers."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema, create_model
from pydantic_core import PydanticCustomError

from dalsegno.errors import UsageError
from dalsegno.jobs.options import OPTIONS, Kind, Option
from dalsegno.jobs.values import parse_env_pairs, parse_words
from dalsegno.spec.section import Section, show

USAGE = "usage"  # pydantic's name for a fault that one of our own parsers found
_QUOTES = "put it in quotes: YAML reads numbers and yes/no in its own way"
# How a list is written in one text; else with commas.
_JOIN: dict[str, Callable[[list[str]], str]] = {"sbatch_args": shlex.join}

_WORD: dict[str, Any] = {"type": ["string", "integer"]}
_WORDS: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": _WORD}]}
_VARIABLES: dict[str, Any] = {"type": "object", "additionalProperties": _WORD}
_SCHEMAS = {Kind.WORD: _WORD, Kind.LIST: _WORDS, Kind.MAPPING: _VARIABLES}


def _text(value: object) -> str:
    """A word of the file. Whole numbers keep their spelling; `0.10`, `1e-4` and `yes` would not."""
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
    """How a value of the file is read: as text, by the parser of the command line."""
    if option.kind is Kind.MAPPING:
        return _variables
    if option.kind is Kind.LIST:
        return lambda value: option.parse(_joined(option, value) if isinstance(value, list) else _text(value))
    return lambda value: option.parse(_text(value))


def _joined(option: Option, words: list[object]) -> str:
    return _JOIN.get(option.word, ",".join)([_text(each) for each in words])


def _value(read: Callable[[object], object], schema: dict[str, Any], examples: tuple[object, ...] = ()) -> Any:
    def check(value: object) -> object:
        try:
            return read(value)
        except UsageError as fault:
            raise PydanticCustomError(USAGE, "{what}", {"what": fault.what, "hint": fault.hint}) from None

    shown = {**schema, "examples": list(examples)} if examples else schema
    return Annotated[object, PlainValidator(check), WithJsonSchema(shown)]


def _field(option: Option) -> tuple[Any, Any]:
    about = Field(default=None, description=option.help)
    if option.kind is Kind.FLAG:
        return bool, about
    return _value(_reader(option), _SCHEMAS[option.kind], option.examples), about


_KEYS: dict[str, Any] = {
    "script": (str, Field(description="What to run: a Python script, or with `no_preload` any program.")),
    "args": (
        _value(_arguments, _WORDS, ("--lr 1e-4", ["--epochs", 10])),
        Field(default=None, description="Its arguments, as a list or in one line."),
    ),
    **{option.word: _field(option) for option in OPTIONS},
}
JobFile: type[Section] = create_model("JobFile", __base__=Section, __doc__="A run, as its file describes it.", **_KEYS)


def job_schema() -> dict[str, Any]:
    """The JSON schema of the job file, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **JobFile.model_json_schema(),
        "title": "Dal Segno job file",
        "patternProperties": {"^x-": {"description": "Your own; a place for anchors."}},
    }
