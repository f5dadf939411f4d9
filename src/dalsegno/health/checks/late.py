"""Questions that depend on something that may hang, and who is to blame when the answer is late."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dalsegno.health.result import Remedy, Result, Verdict, failed
from dalsegno.health.world import NodeWorld
from dalsegno.system.apart import Late, NoAnswer, pace_s

PATIENCE_S, MOST_PATIENCE_S = 1.25, 2.0  # for one command
SLOW_S = PATIENCE_S / 5  # an empty program that takes this long: the machine is slow, not what was asked
SLOW = "slow"  # the code of what is unknown because this machine is slow

_T = TypeVar("_T")


def ask_twice(world: NodeWorld, question: Callable[[float], _T]) -> _T:
    """Ask, and ask again if the answer is late. `question` gets the time limit of each of its commands.

    The second attempt starts from the beginning: a munge credential, for instance, can be decoded only once. `Late`
    blames what was asked, so it needs a second witness: an empty program that starts and ends in good time. Where that
    is slow too, the machine is slow, and the answer is unknown.
    """
    try:
        return question(PATIENCE_S)
    except Late:
        took_s = world.pace_s()
    try:
        return question(min(max(PATIENCE_S, 10 * took_s), MOST_PATIENCE_S))
    except Late as error:
        took_s = max(took_s, world.pace_s())
        if took_s < SLOW_S:
            raise
        raise NoAnswer(_excused(str(error), took_s)) from error


def blame(text: str, remedy: Remedy, code: str, pace_s: Callable[[], float] = pace_s) -> Result:
    """Return the failure of something that took too long, or broke off because the other side waited too long.

    On a machine that is slow itself the result is unknown.
    """
    took_s = pace_s()
    if took_s < SLOW_S:
        return failed(text, remedy, code)
    return Result(Verdict.UNKNOWN, _excused(text, took_s), code=SLOW)


def _excused(text: str, took_s: float) -> str:
    return f"{text}, but this machine is slow: an empty program takes {took_s:.2g} s"
