"""The end of a coordinator: agents are sent home, nodes given back, people told how the run ended or that it rests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol

from dalsegno.launch.agents import Agents
from dalsegno.launch.events import Finish
from dalsegno.launch.folder import RunFolder
from dalsegno.launch.memory import Memory
from dalsegno.launch.telling import Teller, Told
from dalsegno.train.contract import TERMINATED
from dalsegno.train.frames import Message

FAREWELL_S = 3.0
CALLED_S = 10.0  # until an agent has started that has only to sweep its node


class Departing(Told, Protocol):
    """A coordinator that ends."""

    agents: Agents
    memory: Memory
    told: Teller
    folder: RunFolder
    resting: bool  # it ends, and the run does not
    said_farewell: bool

    def keep(self) -> None: ...


async def say_farewell(of: Departing, end: Finish) -> int:
    """Nothing of the run is left when this returns, unless it only rests."""
    of.agents.send_all({"end": _end_message(end), "finish": end.code})
    called = set() if of.resting else await of.staff.call_back(of.memory.used)
    until = time.monotonic() + (CALLED_S if called else FAREWELL_S)
    while (of.agents.peers or called & of.memory.used) and time.monotonic() < until:
        await asyncio.sleep(0.01)
    if not of.resting:
        await of.staff.dismiss(None if end.code == TERMINATED else end.code)
    of.keep()
    of.said_farewell = True  # connections that break from now on have nothing more to tell
    if of.resting:
        of.told.rests(of, end.why)
    else:
        of.told.ended(of, end)
        with contextlib.suppress(OSError):
            of.folder.state.unlink()
    return end.code


def _end_message(end: Finish) -> Message:
    """How the run ended, for agents whose own people want to know."""
    cause = end.cause
    where = {"rank": cause.rank, "node": cause.node} if cause else {}
    return {"code": end.code, "why": end.why, **where}
