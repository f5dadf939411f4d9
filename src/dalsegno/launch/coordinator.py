"""The coordinator: hears agents and Slurm, lets the run's state machine decide, and does what it orders."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

from dalsegno.errors import DalsegnoError
from dalsegno.launch.agent.frames import Message
from dalsegno.launch.agents import Agents
from dalsegno.launch.causes import first_cause
from dalsegno.launch.errands import Errands
from dalsegno.launch.events import (
    Cancelled,
    Event,
    Exclude,
    Finish,
    GaveUpWaiting,
    Hung,
    Joined,
    Left,
    Moved,
    OpenStore,
    Order,
    Release,
    Start,
    Stop,
    Wait,
    Waited,
)
from dalsegno.launch.generations import Phase, Run, advance
from dalsegno.launch.hangs import Marks
from dalsegno.launch.peers import Peer
from dalsegno.launch.saved import Saved, read_saved, write_saved
from dalsegno.launch.seating import start_message
from dalsegno.launch.site import Terms
from dalsegno.launch.staff import Boss, Staff
from dalsegno.launch.telling import Teller
from dalsegno.launch.words import read_word, still_runs
from dalsegno.system.files import read_json, write_atomic
from dalsegno.train.contract import SAVED

CHECK_S = 0.5
ASK_SLURM_S = 5.0
GATHER_S = 30.0  # an elastic run waits so long for all its nodes before it starts with fewer
ADOPT_S = 10.0  # agents that have not found a new coordinator by then are lost
FAREWELL_S = 3.0
TOGETHER_S = 10.0  # how long one waits for another that is starting
STACKS_S = 2.0  # enough for what answers at all; the rest is stuck for good


class Coordinator:
    """One run, from its first agent to its end."""

    def __init__(
        self, site: Terms, staff: Callable[[Boss], Staff], gather_s: float = GATHER_S, told: Teller | None = None
    ) -> None:
        self.site, self.folder, self.gather_s = site, site.folder, gather_s
        self.run = Run(site.shape, site.max_restarts)
        self.lost_nodes = 0
        self.started: float | None = None
        self.began = time.monotonic()  # the present generation
        self.marks = Marks(site.hang_timeout_s, self.began)
        self.hanging = False
        self.told = told or Teller(site)
        self.staff = staff(self)
        self.agents: Agents
        self.end: Finish | None = None
        self.resting = False  # we end, and the run does not
        self._said_farewell = False
        self._newcomers: list[Joined] = []
        self._over = asyncio.Event()
        self._gathering: asyncio.TimerHandle | None = None
        self._errands = Errands()

    async def serve(self) -> int:
        """Until the run has ended; gives its exit code."""
        saved = read_saved(self.folder.state, self.run)
        server = await self.open()
        if saved is None:
            self.journal("began", host=socket.gethostname(), pid=os.getpid())
            self.staff.begin()
        else:
            await self._go_on(saved)
        self._catch_signals()
        await self._errands.until(self._over, self.agents.watch(), self._check(), self._ask_slurm())
        code = await self._say_farewell()
        server.close()
        return code

    def _catch_signals(self) -> None:
        """In a batch step Slurm signals us too. On the head nobody does but to end us; then another takes over."""
        if self.site.own_job is not None:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGUSR2):
                loop.add_signal_handler(number, self._nodes_wanted_back)

    def _nodes_wanted_back(self, job: int = 0) -> None:
        if not self.closing:
            self.staff.leaving(job)

    async def open(self) -> asyncio.Server:
        """Listen, on the port of our former self if there was one, and write down where."""
        known: Any = read_json(self.folder.connect)
        secret = bytes.fromhex(known["secret"]) if known else secrets.token_bytes(32)
        self.agents = Agents(self.folder.run, secret, self.site.timing, self)
        server, port = await self.agents.open(known["port"] if known else 0)
        connect = {"run": self.folder.run, "secret": secret.hex(), "addresses": own_addresses(), "port": port}
        write_atomic(self.folder.connect, json.dumps(connect), mode=0o600)
        return server

    async def _go_on(self, saved: Saved) -> None:
        """After our own death: agents find us by themselves; those that do not are lost."""
        self.run = saved.run
        self.lost_nodes, self.started = saved.lost_nodes, saved.started
        self.staff.excluded, self.staff.silent = list(saved.excluded), dict(saved.silent)
        self.journal("came back", host=socket.gethostname(), pid=os.getpid())
        if await self.staff.adopt(saved.jobs):
            asyncio.get_running_loop().call_later(ADOPT_S, self._give_up_on_missing)
        else:
            for agent in self.run.ready:
                self.apply(Left(agent))
            self.apply(Moved())
            self.staff.begin()
        if self.run.phase is Phase.ENDED:  # we died while we said farewell
            self._finish(Finish(self.run.exit_code or 0, first_cause(self.run.failures), self.run.why))
        if self.run.leaving and self.run.phase is Phase.GATHERING:  # we died before the next job was asked for
            self.soon(self._move())
        if self.run.pausing:
            self.apply(Waited())

    def _give_up_on_missing(self) -> None:
        for agent in [agent for agent in self.run.ready if agent not in self.agents.peers]:
            self.agents.lose(agent, "its agent did not come back", silent=False)

    # Agents

    def agent_came(self, peer: Peer) -> None:
        if self.end is not None:  # late: the others have gone already
            peer.send({"finish": self.end.code})
            return
        self.staff.agent_came(peer.name)
        peer.send({"setup": self.site.setup()})
        if peer.name in self.run.ready:
            self._reconcile(peer)
        elif peer.hello.get("generation"):
            peer.send({"reset": True})
        self.tell()

    def _reconcile(self, peer: Peer) -> None:
        """An agent that a former self knew: bring both to the same mind, without touching its workers."""
        group, generation = self.run.group, self.run.generation
        if peer.hello["generation"] == generation:
            for report in peer.hello["reports"]:
                self.agent_said(peer, {"ended": report})
        if group is None or peer.name not in group.agents:
            return
        if self.run.phase is Phase.OPENING and group.store_agent == peer.name:
            peer.send({"open_store": generation})
        elif self.run.phase is Phase.STOPPING and peer.name in self.run.waiting_for:
            peer.send({"stop": generation})
        elif self.run.phase is Phase.RUNNING and not still_runs(peer.hello, generation):
            self.apply(Left(peer.name))  # its peers wait for workers that are no more
            peer.send({"reset": True})

    def agent_said(self, peer: Peer, message: Message) -> None:
        healthy = peer.name not in self.staff.unhealthy
        event = read_word(peer.name, message, time.monotonic() - self.began, healthy)
        self.told.heard(self.run.generation, peer.name, message, event)
        if "ready" in message:
            self.staff.agent_ready(peer.name)
        elif "cold" in message:
            peer.send({"reset": True})  # orders that were under way are none any more
        elif "broken" in message:
            self._exclude(peer.name, str(message["broken"]))
        elif "signal" in message:
            self._nodes_wanted_back(int(peer.hello.get("job") or 0))
        elif "step" in message and message.get("generation") == self.run.generation:
            self.marks.step(int(message["step"]), time.monotonic())
        elif "grant" in message:
            self._answer_grant(peer, message)
        if isinstance(event, Joined):
            self._take_in(event)
        elif event is not None:
            self.apply(event)

    def _take_in(self, event: Joined) -> None:
        """While a run that is smaller than asked for runs, newcomers that come together are taken in together."""
        self._newcomers.append(event)
        smaller = self.run.phase is Phase.RUNNING and self.run.group and len(self.run.group.places) < self.wanted
        others = self.present - set(self.run.ready) - {each.agent for each in self._newcomers}
        if not (smaller and others):
            self._let_in()
        elif len(self._newcomers) == 1:
            asyncio.get_running_loop().call_later(TOGETHER_S, self._let_in)

    def _let_in(self) -> None:
        newcomers, self._newcomers = self._newcomers, []
        for event in newcomers:
            if event.agent in self.agents.peers:
                self.apply(event)

    def _answer_grant(self, peer: Peer, message: Message) -> None:
        """May a worker of this generation commit what it wrote? Only while the generation is the present one."""
        ok = self.run.phase is Phase.RUNNING and message["generation"] == self.run.generation
        why = "" if ok else f"generation {message['generation']} is over"
        peer.send({"granted": {"number": message["grant"], "ok": ok, "why": why}})

    def agent_lost(self, agent: str, why: str, silent: bool) -> None:
        self.staff.agent_lost(agent, silent)
        if not self.closing:
            self.lost_nodes += agent in self.run.ready
            self.journal("lost", node=agent, why=why)
        self.apply(Left(agent))

    # Deciding and doing

    def apply(self, event: Event) -> None:
        before = self.run
        self.run, orders = advance(self.run, event)
        if self.run is before and not orders:
            return
        if self.run.phase is Phase.RUNNING:
            self.started = self.started or time.time()
        self.keep()  # before anything is done: a successor must know of it
        for order in orders:
            self._do(order)
        self._watch_gathering()
        self.tell()

    def _do(self, order: Order) -> None:
        if isinstance(order, OpenStore):
            self.told.generation(self.run)
            self.agents.send(order.agent, {"open_store": order.generation})
        elif isinstance(order, Start):
            self._start(order)
        elif isinstance(order, Stop):
            self.agents.send(order.agent, {"stop": order.generation})
        elif isinstance(order, Wait):
            self.journal("pause", seconds=order.seconds)
            asyncio.get_running_loop().call_later(order.seconds, self.apply, Waited())
        elif isinstance(order, Exclude):
            self._exclude(order.agent, order.why)
        elif isinstance(order, Release):
            self.soon(self._move())
        elif isinstance(order, Finish):
            self._finish(order)

    def _start(self, order: Start) -> None:
        self.began = time.monotonic()
        self.marks, self.hanging = Marks(self.site.hang_timeout_s, self.began), False
        message = start_message(self.site, order, self.agents.peers)
        if message is not None:
            self.agents.send(order.agent, message)

    def _exclude(self, agent: str, why: str) -> None:
        self.note(f"{agent}: {why}; the run goes on without it")
        self.staff.excluded.append(agent)
        self.agents.send(agent, {"finish": 0})

    async def _move(self) -> None:
        self.agents.send_all({"finish": 0})
        await self.staff.move()

    def _finish(self, order: Finish) -> None:
        if self.end is None:
            self.end = order
            self._over.set()

    def stop(self, code: int, why: str) -> None:
        self._finish(Finish(code, why=why))

    def rest(self, why: str) -> None:
        self.resting = self.end is None
        self._finish(Finish(SAVED, why=why))

    def _watch_gathering(self) -> None:
        """An elastic run that could start smaller does so after a while."""
        run = self.run
        could = run.phase is Phase.GATHERING and not run.smaller and len(run.ready) >= run.shape.min_nodes
        if could and self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(self.gather_s, self._gave_up_waiting)
        elif not could and self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None

    def _gave_up_waiting(self) -> None:
        self._gathering = None
        self.apply(GaveUpWaiting())

    # Looking after things

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            if self.folder.cancel.exists():
                self.apply(Cancelled())
            self.staff.look_after()
            self._look_for_hang()
            self.tell()

    async def _ask_slurm(self) -> None:
        while True:
            await asyncio.sleep(ASK_SLURM_S)
            await self.staff.ask_slurm()

    def _look_for_hang(self) -> None:
        if self.run.phase is not Phase.RUNNING or self.hanging:
            return
        if self.site.hang_timeout_s:
            self.marks.sign(self.told.last_output(self.run.generation))
        overdue = self.marks.overdue_s(time.monotonic())
        if overdue is not None:
            self.hanging = True
            self.soon(self._end_hang(self.run.generation, overdue))

    async def _end_hang(self, generation: int, overdue_s: float) -> None:
        why = f"no step for {overdue_s:.0f} s; where the ranks were is in {self.folder.root / 'stacks'}"
        self.note(why)
        self.agents.send_all({"stacks": generation})
        await asyncio.sleep(STACKS_S)
        self.apply(Hung(generation, why, time.monotonic() - self.began))

    def soon(self, work: Awaitable[None]) -> None:
        self._errands.soon(work)

    # What the staff asks

    @property
    def closing(self) -> bool:
        return self.ending or self.run.leaving

    @property
    def ending(self) -> bool:
        return self.end is not None or self.run.exit_code is not None

    @property
    def present(self) -> frozenset[str]:
        return frozenset(self.agents.peers)

    @property
    def wanted(self) -> int:
        return self.run.shape.max_nodes

    @property
    def generation(self) -> int:
        return self.run.generation

    # Telling

    def keep(self) -> None:
        if self._said_farewell:
            return
        saved = Saved(
            run=self.run,
            jobs=self.staff.saved(),
            excluded=tuple(self.staff.excluded),
            silent=dict(self.staff.silent),
            lost_nodes=self.lost_nodes,
            started=self.started,
        )
        with contextlib.suppress(DalsegnoError):  # a full disk must not end the run
            write_saved(self.folder.state, saved)

    def tell(self) -> None:
        if not self._said_farewell:
            self.told.status(self)

    def note(self, text: str) -> None:
        self.told.note(text)

    def journal(self, event: str, **what: object) -> None:
        self.told.journal(event, **what)

    async def _say_farewell(self) -> int:
        """Nothing of the run is left when this returns."""
        assert self.end is not None
        self.agents.send_all({"end": _end_message(self.end), "finish": self.end.code})
        until = time.monotonic() + FAREWELL_S
        while self.agents.peers and time.monotonic() < until:
            await asyncio.sleep(0.01)
        if not self.resting:
            await self.staff.dismiss()
        self.keep()
        self._said_farewell = True  # connections that break from now on have nothing more to tell
        if self.resting:
            self.told.rests(self, self.end.why)
            return self.end.code
        self.told.ended(self, self.end)
        with contextlib.suppress(OSError):
            self.folder.state.unlink()
        return self.end.code


def _end_message(end: Finish) -> Message:
    """How the run ended, for agents whose own people want to know."""
    cause = end.cause
    where = {"rank": cause.rank, "node": cause.node} if cause else {}
    return {"code": end.code, "why": end.why, **where}


def own_addresses() -> list[str]:
    """Where agents may find us: the addresses of our name first."""
    found: list[Any] = []
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in found]
    outward = [address for address in addresses if not address.startswith("127.")]
    return list(dict.fromkeys([*outward, *addresses, "127.0.0.1"]))
