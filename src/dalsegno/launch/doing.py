"""Doing what the run's state machine orders: words to agents, pauses, nodes given back, the end."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from dalsegno.launch.agents import Agents
from dalsegno.launch.events import Exclude, Finish, OpenStore, Order, Release, Start, Stop, Wait, Waited
from dalsegno.launch.generations import Run
from dalsegno.launch.hang_watch import HangWatch
from dalsegno.launch.journal import RunEvent
from dalsegno.launch.memory import Memory
from dalsegno.launch.seating import start_message
from dalsegno.launch.site import Terms
from dalsegno.launch.staff import Boss, Staff
from dalsegno.launch.telling import Teller


class Doer(Boss, Protocol):
    """The coordinator, as far as it has hands."""

    run: Run
    site: Terms
    agents: Agents
    staff: Staff
    hangs: HangWatch
    memory: Memory
    told: Teller

    def finish(self, order: Finish) -> None: ...


def do(of: Doer, order: Order) -> None:
    if isinstance(order, OpenStore):
        of.told.generation(of.run)
        of.agents.send(order.agent, {"open_store": order.generation})
    elif isinstance(order, Start):
        _start(of, order)
    elif isinstance(order, Stop):
        of.agents.send(order.agent, {"stop": order.generation})
    elif isinstance(order, Wait):
        of.journal(RunEvent.PAUSE, seconds=order.seconds)
        asyncio.get_running_loop().call_later(order.seconds, of.apply, Waited())
    elif isinstance(order, Exclude):
        _leave(of, order)
    elif isinstance(order, Release):
        of.soon(_move(of))
    elif isinstance(order, Finish):
        of.finish(order)


def _start(of: Doer, order: Start) -> None:
    of.hangs.generation_started()
    in_memory = of.memory.start(order.group, order.agent, time.monotonic())
    message = start_message(of.site, order, of.agents.peers, in_memory)
    if message is not None:
        of.agents.send(order.agent, message)


def _leave(of: Doer, order: Exclude) -> None:
    if not order.until_mended:
        exclude(of, order.agent, order.why)
        return
    of.staff.leave_to_be_mended(order.agent)
    of.go_on_without(order.agent, order.why)


def exclude(of: Doer, agent: str, why: str) -> None:
    """Its node is not taken again."""
    of.note(f"{agent}: {why}; the run goes on without it")
    of.staff.excluded.append(agent)
    of.agents.send(agent, {"finish": 0})


async def _move(of: Doer) -> None:
    of.agents.send_all({"finish": 0})
    await of.staff.move()
