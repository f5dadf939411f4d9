"""A check: a name, a question, a judge, and when it is asked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dalsegno.health.result import Result

if TYPE_CHECKING:  # commands that only name a finding also start on Windows, where no check can run
    from dalsegno.health.world import NodeWorld

# ---- A check: a name, a question, a judge, and when it is asked.


class Context(Enum):
    """When a node is looked at."""

    CONTINUOUS = "continuous"  # all the time, beside whatever runs: cheap
    IDLE = "idle"  # when no job is on it
    PROLOG = "prolog"  # before a job, which waits for it
    VALIDATION = "validation"  # before a new or mended node is put into service


ALWAYS = frozenset(Context)
NO_JOB = frozenset({Context.IDLE, Context.PROLOG, Context.VALIDATION})
QUIET = frozenset({Context.IDLE, Context.VALIDATION})
WATCHING = frozenset({Context.CONTINUOUS})


def always(world: NodeWorld) -> bool:
    return True


@dataclass(frozen=True)
class Check:
    """`ask` looks at the world, `judge` at nothing but the answer; the judge's keyword-only parameters are the check's
    thresholds, with their defaults. A check that does not apply to a node is left out there."""

    name: str
    about: str
    ask: Callable[[NodeWorld], Any]
    judge: Callable[..., Result]
    contexts: frozenset[Context] = ALWAYS
    every_s: float = 30.0
    applies: Callable[[NodeWorld], bool] = always
    settle_s: float = 0.0  # a failure that may pass by itself counts, to those who watch, when it has lasted so long
    lasts: bool = True  # what passed a moment ago need not be asked again before the next job

    @cached_property
    def thresholds(self) -> Mapping[str, float]:
        parameters = inspect.signature(self.judge).parameters.values()
        return {each.name: each.default for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
