"""Which faults a drill injects, where and after how many steps. Pure: the same seed, the same drill."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from dalsegno.errors import UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.targets.faults import Options


@dataclass(frozen=True)
class Kind:
    """A fault as `inject` knows it, and what is to be expected of it."""

    fault: str
    options: Options = field(default_factory=Options)
    stops: bool = True  # training cannot go on where it was
    heals: bool = True  # the controller has something to mend
    weight: int = 1
    by_agent: bool = False  # only the node's agent can see it, or be hit by it

    @property
    def label(self) -> str:
        """`xid 79`"""
        return f"{self.fault} {self.options.code}" if self.options.code is not None else self.fault


KINDS = (
    Kind("power-off", weight=3),
    Kind("worker-kill", heals=False, weight=3),
    Kind("xid", Options(code=79), weight=2, by_agent=True),
    Kind("agent-dead", stops=False, heals=False, by_agent=True),
    Kind("slurmd-dead", stops=False),
    Kind("net-cut", Options(for_s=3.0)),
)


@dataclass(frozen=True)
class Lot:
    """One fault to come."""

    kind: Kind
    after_steps: int  # since the last one was recovered from
    node: int  # the how manieth of those that train at that time


def chosen(names: Sequence[str]) -> Sequence[Kind]:
    """The kinds of these names; all where none is named."""
    known = [kind.fault for kind in KINDS]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known, f"one of {', '.join(known)}")
            raise UsageError(f"a drill has no fault `{name}`", hint=hint)
    return [kind for kind in KINDS if not names or kind.fault in names]


def draw(count: int, seed: int, kinds: Sequence[Kind] = KINDS) -> list[Lot]:
    """Every kind once, as far as there is room, then by weight; in random order."""
    dice = random.Random(seed)
    chosen = dice.sample(list(kinds), min(count, len(kinds)))
    chosen += dice.choices(list(kinds), [kind.weight for kind in kinds], k=count - len(chosen))
    dice.shuffle(chosen)
    return [Lot(kind, dice.randint(5, 25), dice.randrange(1_000_000)) for kind in chosen]
