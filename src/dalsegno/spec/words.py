"""Slurm's fixed words, in the spelling Slurm writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import BeforeValidator, PlainValidator, WithJsonSchema

from dalsegno.hardware import did_you_mean
from dalsegno.spec.section import fault, show


def word(*words: str, yes: str = "", no: str = "") -> Callable[[object], str]:
    """A validator for one of `words` in any case. YAML turns bare `off` and `no` into false; they are taken back."""

    def check(value: object) -> str:
        said = (yes if value else no) if isinstance(value, bool) else value
        if isinstance(said, str) and (found := [each for each in words if each.lower() == said.lower()]):
            return found[0]
        raise fault(f"must be one of {', '.join(words)}, not {show(value)}", did_you_mean(str(value), words))

    return check


def one_of(*words: str) -> WithJsonSchema:
    """For editors: the words in either case."""
    return WithJsonSchema({"enum": list(dict.fromkeys([*(each.lower() for each in words), *words]))})


def _split(value: object) -> object:
    """Slurm writes lists with commas."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


_PREEMPT = ("OFF", "CANCEL", "REQUEUE", "SUSPEND")
_JOBS_OUT = ("CANCEL", "REQUEUE", "SUSPEND")
_RESETS = ("NONE", "NOW", "DAILY", "WEEKLY", "MONTHLY", "QUARTERLY", "YEARLY")
_ENFORCE = ("associations", "limits", "nojobs", "nosteps", "qos", "safe", "wckeys", "all")
_FLAGS = (
    *("ANY_NODES", "DAILY", "FIRST_CORES", "FLEX", "HOURLY", "IGNORE_JOBS", "LICENSE_ONLY", "MAGNETIC", "MAINT"),
    *("NO_HOLD_JOBS_AFTER", "OVERLAP", "PART_NODES", "PURGE_COMP", "REPLACE", "REPLACE_DOWN", "SPEC_NODES"),
    *("STATIC_ALLOC", "TIME_FLOAT", "USER_DELETE", "WEEKDAY", "WEEKEND", "WEEKLY"),
)

PreemptMode = Annotated[str, PlainValidator(word(*_PREEMPT, no="OFF")), one_of(*_PREEMPT)]
PreemptAction = Annotated[str, PlainValidator(word(*_JOBS_OUT)), one_of(*_JOBS_OUT)]
UsageReset = Annotated[str, PlainValidator(word(*_RESETS, no="NONE")), one_of(*_RESETS)]
EnforceWord = Annotated[str, PlainValidator(word(*_ENFORCE)), one_of(*_ENFORCE)]
ReservationFlag = Annotated[str, PlainValidator(word(*_FLAGS)), one_of(*_FLAGS)]

# As a list, or as Slurm writes it: `associations,limits`.
Enforce = Annotated[list[EnforceWord], BeforeValidator(_split, json_schema_input_type=str | list[EnforceWord])]
ReservationFlags = Annotated[
    list[ReservationFlag], BeforeValidator(_split, json_schema_input_type=str | list[ReservationFlag])
]
