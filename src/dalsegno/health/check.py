"""A health check: its name, how it observes a node, how it judges the observation, and when it runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dalsegno.health.result import Result

if TYPE_CHECKING:  # not imported at run time, because commands that only show findings also run on Windows
    from dalsegno.health.node_reader import NodeReader


class Context(Enum):
    """The situation in which a node is checked."""

    CONTINUOUS = "continuous"  # the checks run all the time, also while jobs run, so they must be cheap
    IDLE = "idle"  # the node has no job
    PROLOG = "prolog"  # a job is about to start and waits for the checks
    VALIDATION = "validation"  # a new or repaired node is about to enter service


ALWAYS = frozenset(Context)
NO_JOB = frozenset({Context.IDLE, Context.PROLOG, Context.VALIDATION})
QUIET = frozenset({Context.IDLE, Context.VALIDATION})
WATCHING = frozenset({Context.CONTINUOUS})


def always(node: NodeReader) -> bool:
    return True


@dataclass(frozen=True)
class Check:
    """A check. `ask` observes the node; `judge` decides from the result of `ask` alone.

    The judge's keyword-only parameters are the thresholds, with their defaults. A check that does not apply to a node
    is skipped there.
    """

    name: str
    about: str
    ask: Callable[[NodeReader], Any]
    judge: Callable[..., Result]
    contexts: frozenset[Context] = ALWAYS
    every_s: float = 30.0
    applies: Callable[[NodeReader], bool] = always
    settle_s: float = 0.0  # in continuous checks, a failure counts only after it has lasted this long
    lasts: bool = True  # whether the prolog may reuse a recent pass instead of running the check again

    @cached_property
    def thresholds(self) -> Mapping[str, float]:
        parameters = inspect.signature(self.judge).parameters.values()
        return {each.name: each.default for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
