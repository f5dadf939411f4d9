"""The coordinator of a run: receives events from agents and Slurm and executes the orders of the state machine."""

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
from dataclasses import dataclass
from typing import Any, Protocol

from dalsegno.errors import DalsegnoError
from dalsegno.runs.agent.link import fallback_ports
from dalsegno.runs.coordinator.actions import Gathering, exclude, execute
from dalsegno.runs.coordinator.agents import Peer, RunAgents
from dalsegno.runs.coordinator.events import Cancelled, Event, Finish, Joined, Left
from dalsegno.runs.coordinator.generations import GenerationPhase, Run, advance
from dalsegno.runs.coordinator.goodput import Pen
from dalsegno.runs.coordinator.hangs import HangWatch
from dalsegno.runs.coordinator.memory import MemoryTable
from dalsegno.runs.coordinator.messages import (
    AgentMessage,
    AllStopped,
    Broken,
    Cold,
    EndedWorker,
    GrantAsked,
    Kept,
    Ready,
    Signalled,
    StacksTaken,
    Stepped,
    Worked,
    to_event,
)
from dalsegno.runs.coordinator.report import RunView, StatusWriter
from dalsegno.runs.coordinator.saved_state import Saved, write_saved
from dalsegno.runs.coordinator.site import CHECK_S, RunTerms
from dalsegno.runs.coordinator.staff import BackgroundTasks, Boss, Staff
from dalsegno.runs.coordinator.takeover import find_saved, reconcile, take_over
from dalsegno.runs.folder import RunFolder, repair_hint
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.status import RunCause
from dalsegno.system.files import read_json, write_atomic
from dalsegno.train.contract import SAVED, TERMINATED
from dalsegno.wire.frames import Message

# Connection file: address and secret by which agents find the coordinator


@dataclass(frozen=True)
class Connect:
    secret: bytes
    port: int = 0  # 0: any free port


def read_connect(folder: RunFolder) -> Connect:
    """Return the previous coordinator's secret and port, so that its agents reconnect, or a new secret."""
    known: Any = read_json(folder.connect, repair_hint(folder.connect))
    return Connect(bytes.fromhex(known["secret"]), known["port"]) if known else Connect(secrets.token_bytes(32))


def write_connect(folder: RunFolder, connect: Connect) -> None:
    data = {"run": folder.run, "secret": connect.secret.hex(), "addresses": own_addresses(), "port": connect.port}
    write_atomic(folder.connect, json.dumps(data), mode=0o600)


def own_addresses() -> list[str]:
    """Return the addresses agents may connect to, those of the host name first."""
    found: list[Any] = []
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in found]
    outward = [address for address in addresses if not address.startswith("127.")]
    return list(dict.fromkeys([*outward, *addresses, "127.0.0.1"]))


# Shutdown


SHUTDOWN_S = 3.0
SWEEP_START_S = 10.0  # time for an agent to start that only cleans up its node


class EndingCoordinator(RunView, Protocol):
    """A coordinator that is shutting down."""

    agents: RunAgents
    memory: MemoryTable
    status_writer: StatusWriter
    folder: RunFolder
    suspended: bool  # the coordinator ends but the run does not
    is_shut_down: bool

    def save_state(self) -> None: ...


async def shut_down(coordinator: EndingCoordinator, end: Finish) -> int:
    """Finish all agents, release the nodes and write the final status; return the exit code."""
    coordinator.agents.send_all({"end": _end_message(end), "finish": end.code})
    called = set() if coordinator.suspended else await coordinator.staff.recall_agents(coordinator.memory.used)
    until = time.monotonic() + (SWEEP_START_S if called else SHUTDOWN_S)
    while (coordinator.agents.peers or called & coordinator.memory.used) and time.monotonic() < until:
        await asyncio.sleep(0.01)
    if not coordinator.suspended:
        await coordinator.staff.release_all(None if end.code == TERMINATED else end.code)
    coordinator.save_state()
    coordinator.is_shut_down = True  # connections that break from now on are not reported
    if coordinator.suspended:
        coordinator.status_writer.run_suspended(coordinator, end.why)
    else:
        coordinator.status_writer.ended(coordinator, end)
        with contextlib.suppress(OSError):
            coordinator.folder.state.unlink()
    return end.code


def _end_message(end: Finish) -> Message:
    """Return how the run ended, for agents that report it to their own users."""
    cause = end.cause
    where = {"rank": cause.rank, "node": cause.node} if cause else {}
    return {"code": end.code, "why": end.why, **where}


GATHER_S = 30.0  # how long an elastic run waits for all its nodes before it starts with fewer


class Coordinator:
    """The coordinator of one run, from its first agent to its end."""

    def __init__(
        self,
        site: RunTerms,
        staff: Callable[[Boss], Staff],
        gather_s: float = GATHER_S,
        status_writer: StatusWriter | None = None,
    ) -> None:
        self.site, self.folder = site, site.folder
        self.run = Run(site.shape, site.max_restarts)
        self.lost_nodes = 0
        self.started: float | None = None
        self.status_writer = status_writer or StatusWriter(site)
        self.staff = staff(self)
        self.agents: RunAgents
        self.gathering = Gathering(self, gather_s)
        self.hangs = HangWatch(self, site.hang_timeout_s)
        self.memory = MemoryTable()
        self.progress_writer = Pen(site.folder.progress)
        self.granted = 0  # the newest generation that was allowed to commit
        self.end: Finish | None = None
        self.suspended = False  # the coordinator ends but the run does not
        self.is_shut_down = False
        self._left: set[str] = set()  # nodes excluded on purpose whose agents may still be connected
        self._over = asyncio.Event()
        self._background = BackgroundTasks()

    async def serve(self) -> int:
        """Coordinate the run until it has ended and return its exit code."""
        saved = await find_saved(self.site, self.staff.release_all, self.note)
        await self.open()
        if saved is None:
            self.journal(RunEvent.BEGAN, host=socket.gethostname(), pid=os.getpid())
            self.staff.begin()
        else:
            await take_over(self, saved)
        self._catch_signals()
        await self._background.until(self._over, self.agents.watch(), self._check(), self._ask_slurm())
        assert self.end is not None
        code = await shut_down(self, self.end)
        self.agents.close()
        return code

    def _catch_signals(self) -> None:
        """Handle Slurm's signals in a batch step. On the head node, signals end the coordinator and another takes
        over."""
        if self.site.own_job is not None:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGUSR2):
                loop.add_signal_handler(number, self._start_leaving)

    def _start_leaving(self, job: int = 0, node: str = "") -> None:
        if not self.closing:
            self.staff.leaving(job, node)

    async def open(self) -> None:
        """Listen on the previous coordinator's port, or on one its agents try next, and write the connection file."""
        known = read_connect(self.folder)
        self.agents = RunAgents(self.folder.run, known.secret, self.site.timing, self)
        port = await self._listen(known)
        write_connect(self.folder, Connect(known.secret, port))

    async def _listen(self, known: Connect) -> int:
        if not known.port:
            return await self.agents.open(0)
        for port in (known.port, *fallback_ports(known.secret)):
            try:
                return await self.agents.open(port)
            except OSError as error:
                self.note(f"cannot listen on port {port}: {error.strerror or error}; trying another one")
        return await self.agents.open(0)  # agents started from now on read this port

    # Agents

    def agent_came(self, peer: Peer) -> None:
        if self.end is not None:  # a late agent: the others have finished already
            self.memory.used.discard(peer.name)
            peer.send({"finish": self.end.code})
            return
        if not self.staff.agent_came(peer.name, again=bool(peer.hello.generation) and peer.name not in self.run.ready):
            self.continue_without(peer.name, "it was lost, and Slurm has marked it down")
            return
        keeper = (peer.host, peer.hello.keeper) if peer.hello.keeper else None
        self.memory.update(peer.name, peer.hello.held, keeper, peer.hello.safe)
        peer.send({"setup": self.site.setup()})
        if peer.name in self.run.ready:
            self._readmit(peer)
        elif peer.hello.generation:
            peer.send({"reset": True})
        self.update_status()

    def _readmit(self, peer: Peer) -> None:
        """Take back an agent of the previous coordinator, with the reports it kept of workers that ended meanwhile."""
        if peer.hello.generation == self.run.generation:
            for report in peer.hello.reports:
                self.agent_said(peer, EndedWorker(report))
        reconcile(self, peer)

    def agent_said(self, peer: Peer, message: AgentMessage) -> None:
        event = to_event(peer.name, message, self.hangs.age_s, healthy=peer.name not in self.staff.unhealthy)
        self.status_writer.record_message(self.run.generation, peer.name, message, event)
        if isinstance(message, Ready):
            self.staff.agent_ready(peer.name)
            if not message.warm:
                self.memory.forget_keeper(peer.name)
        elif isinstance(message, Cold):
            peer.send({"reset": True})  # orders in progress are void
        elif isinstance(message, Broken):
            exclude(self, peer.name, message.why)
        elif isinstance(message, Signalled):
            self._start_leaving(peer.hello.job, peer.name)
        elif isinstance(message, Stepped):
            self._stepped(message)
        elif isinstance(message, StacksTaken):
            self.hangs.stacks_done(peer.name)
        elif isinstance(message, Worked):
            self.hangs.worked(message.generation, message.ranks)
        elif isinstance(message, GrantAsked):
            self._answer_grant(peer, message)
        elif isinstance(message, AllStopped):
            self.memory.update(peer.name, message.held)
        elif isinstance(message, Kept):
            self.memory.update(peer.name, message.held)
            self._send_memory_updates()
        if isinstance(event, Joined):
            self.gathering.admit(event)
        elif event is not None:
            self.apply(event)

    def _stepped(self, message: Stepped) -> None:
        self.hangs.stepped(message.generation, message.step)
        if message.over:
            self.hangs.stop_timer(message.generation)
        if message.generation == self.run.generation:
            self.progress_writer.record_step(message)

    def _send_memory_updates(self) -> None:
        if self.run.phase is GenerationPhase.RUNNING and self.run.group is not None:
            for agent, message in self.memory.updates(self.run.group, time.monotonic()):
                self.agents.send(agent, message)

    def _answer_grant(self, peer: Peer, asked: GrantAsked) -> None:
        """Allow or deny a commit. A saver may finish its generation's work until a later generation has committed."""
        ok = self.granted <= asked.generation <= self.run.generation and self.end is None
        why = "" if ok else f"generation {asked.generation} is over"
        if ok and asked.generation > self.granted:
            before, self.granted = self.granted, asked.generation
            if not self._write_state(durable=True):  # a successor would let an earlier generation commit
                self.granted, ok, why = before, False, "the run's folder cannot be written"
        peer.send({"granted": {"number": asked.number, "ok": ok, "why": why}})

    def agent_lost(self, agent: str, why: str, silent: bool) -> None:
        self.staff.agent_lost(agent, silent)
        self.hangs.stacks_done(agent)
        self.memory.lost(agent)
        if not self.closing and agent not in self._left:
            self.lost_nodes += agent in self.run.ready
            self.status_writer.lost(self.run, agent, why)
        self._left.discard(agent)
        self.apply(Left(agent))

    def message_too_long(self, agent: str, detail: str) -> None:
        """End the run: an agent that misses an order waits forever, and a restart would send the same message."""
        self.stop(1, f"a message to {agent} is too long: {detail}")

    def continue_without(self, node: str, why: str) -> None:
        """Continue without this node. The end of its agent is expected from now on and is not a loss."""
        self._left.add(node)
        self.journal(RunEvent.LEFT, node=node, why=why)
        self.note(f"{node}: {why}; the run continues without it")
        self.agents.send(node, {"finish": 0})
        self.apply(Left(node))

    # Events and orders

    def apply(self, event: Event) -> None:
        before = self.run
        self.run, orders = advance(self.run, event)
        if self.run is before and not orders:
            return
        self.progress_writer.changed(before, self.run)
        if self.run.phase is GenerationPhase.RUNNING:
            self.started = self.started or time.time()
        self.memory.used.update(self.run.group.agents if self.run.group else ())
        self.save_state()  # before anything is executed: a successor must know of it
        for order in orders:
            execute(self, order)
        self.gathering.watch()
        self.update_status()

    def finish(self, order: Finish) -> None:
        if self.end is None:
            self.end = order
            self._over.set()

    def stop(self, code: int, why: str, about: RunCause = RunCause.OTHER) -> None:
        self.finish(Finish(code, why=why, about=about))

    def suspend(self, why: str) -> None:
        self.suspended = self.end is None
        self.finish(Finish(SAVED, why=why))

    # Periodic checks

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            if self.folder.cancel.exists():
                self.apply(Cancelled())
            self.staff.check_agents()
            self.hangs.look()
            self._send_memory_updates()
            self.update_status()

    async def _ask_slurm(self) -> None:
        while True:
            await asyncio.sleep(self.staff.ask_again_s)
            await self.staff.ask_slurm()

    def run_in_background(self, work: Awaitable[None]) -> None:
        self._background.run_in_background(work)

    # Queries of the staff

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
    def ready(self) -> frozenset[str]:
        return frozenset(self.run.ready)

    @property
    def wanted(self) -> int:
        return self.run.shape.max_nodes

    @property
    def generation(self) -> int:
        return self.run.generation

    # Reports

    def save_state(self) -> None:
        """Write what a successor needs. A full disk must not end the run."""
        self._write_state(durable=False)

    def _write_state(self, durable: bool) -> bool:
        """Write the state and return whether that worked. With `durable` it survives a crash of the machine."""
        if self.is_shut_down:
            return True
        saved = Saved(
            run=self.run,
            jobs=self.staff.saved(),
            excluded=tuple(self.staff.excluded),
            silent=dict(self.staff.silent),
            lost_nodes=self.lost_nodes,
            started=self.started,
            granted=self.granted,
            used=tuple(sorted(self.memory.used)),
        )
        try:
            write_saved(self.folder.state, saved, durable)
        except DalsegnoError:
            return False
        return True

    def update_status(self) -> None:
        if not self.is_shut_down:
            self.status_writer.status(self)
            if self.staff.has_nodes and not self.started:
                self.progress_writer.record_grant()
            self.progress_writer.write(last=self.end is not None)

    def note(self, text: str) -> None:
        self.status_writer.note(text)

    def journal(self, event: RunEvent, **what: object) -> None:
        self.status_writer.journal(event, **what)
