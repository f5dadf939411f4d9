"""The coordinator: hears agents and Slurm, lets the run's state machine decide, and does what it orders."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any


from dalsegno.launch.agent.frames import Message
from dalsegno.launch.causes import Failure, read_failure
from dalsegno.launch.events import (
    Cancelled,
    Event,
    Exclude,
    Finish,
    GaveUpWaiting,
    Hung,
    Joined,
    Leaving,
    Left,
    Moved,
    OpenStore,
    Order,
    Release,
    Start,
    Stop,
    Stopped,
    StoreOpened,
    Wait,
    Waited,
    WorkerEnded,
)
from dalsegno.launch.generations import Phase, Run, advance
from dalsegno.launch.hangs import Marks
from dalsegno.launch.peers import Door, Peer
from dalsegno.launch.pulse import Pulse
from dalsegno.launch.saved import Saved, read_saved, write_saved
from dalsegno.launch.site import Seats, Site
from dalsegno.launch.slurm_jobs import JOIN, MAIN, NEXT, Job, SlurmJobs
from dalsegno.launch.telling import Teller
from dalsegno.slurm.states import JobState
from dalsegno.system.files import read_json, write_atomic
from dalsegno.train.contract import GENERATION, RUN, WANTED_NODES

CHECK_S = 0.5
ASK_SLURM_S = 5.0
GATHER_S = 30.0  # an elastic run waits so long for all its nodes before it starts with fewer
ADOPT_S = 10.0  # agents that have not found a new coordinator by then are lost
FAREWELL_S = 3.0
MAX_RESTAFF = 5  # of one node, in a row, without its agent having joined


class Coordinator:
    """One run, from its first job to its end."""

    def __init__(self, site: Site) -> None:
        self.site, self.folder = site, site.folder
        self.run = Run(site.shape, site.max_restarts)
        self.store_port = 0
        self.peers: dict[str, Peer] = {}
        self.silent: set[str] = set()  # lost without a word: their hosts are taken to be dead
        self.excluded: list[str] = []
        self.restaffed: dict[str, int] = {}
        self.lost_nodes = 0
        self.started: float | None = None
        self.began = time.monotonic()  # the present generation
        self.marks = Marks(site.hang_timeout_s, self.began)
        self.hanging = False
        self.jobs = SlurmJobs(site, self)
        self.told = Teller(site)
        self.over = asyncio.Event()
        self.end: Finish | None = None
        self.gather_timer: asyncio.TimerHandle | None = None
        self.secret = b""
        self.pulse: Pulse

    async def serve(self) -> int:
        """Until the run has ended; gives its exit code."""
        saved = read_saved(self.folder.state, self.run)
        server = await self._open()
        if saved is None:
            self.told.journal("began", host=socket.gethostname(), pid=os.getpid())
            self._ask_for_nodes()
        else:
            await self._go_on(saved)
        tasks = [asyncio.ensure_future(each) for each in (self.pulse.watch(self._silent), self._check(), self._ask())]
        await self.over.wait()
        for task in tasks:
            task.cancel()
        code = await self._say_farewell()
        server.close()
        return code

    async def _open(self) -> asyncio.Server:
        """Listen, on the port of our former self if there was one, and write down where."""
        known: Any = read_json(self.folder.connect)
        self.secret = bytes.fromhex(known["secret"]) if known else secrets.token_bytes(32)
        door = Door(self.site.folder.run, self.secret, self._came, self._said, self._gone)
        server, port = await door.open(known["port"] if known else 0)
        self.pulse = Pulse(self.secret, self.site.timing, lambda agent: self._probe_address(agent))
        self.pulse.open(port)
        connect = {
            "run": self.folder.run, "secret": self.secret.hex(), "addresses": own_addresses(), "port": port,
        }  # fmt: skip
        write_atomic(self.folder.connect, json.dumps(connect), mode=0o600)
        return server

    def _probe_address(self, agent: str) -> tuple[str, int] | None:
        return self.peers[agent].probe if agent in self.peers else None

    def _ask_for_nodes(self, role: str = MAIN) -> None:
        if self.site.own_job is not None:
            self.jobs.take(role, self.site.own_job)
        else:
            self.jobs.ask(role, suspects=self.excluded)
        self._keep()

    async def _go_on(self, saved: Saved) -> None:
        """After our own death: agents find us by themselves; those that do not are lost."""
        self.run, self.store_port = saved.run, saved.store_port
        self.excluded, self.lost_nodes, self.started = list(saved.excluded), saved.lost_nodes, saved.started
        self.told.journal("came back", host=socket.gethostname(), pid=os.getpid())
        same_job = self.site.own_job is None or any(job.job == self.site.own_job for job in saved.jobs)
        if same_job and saved.jobs:
            await self.jobs.adopt(saved.jobs)
            asyncio.get_running_loop().call_later(ADOPT_S, self._give_up_on_missing)
        else:
            for agent in self.run.ready:
                self._apply(Left(agent))
            self._apply(Moved())
            self._ask_for_nodes()
        if self.run.pausing:
            self._apply(Waited())

    def _give_up_on_missing(self) -> None:
        for agent in [agent for agent in self.run.ready if agent not in self.peers]:
            self._lost(agent, "its agent did not come back", silent=False)

    # Agents

    def _came(self, peer: Peer) -> None:
        old = self.peers.get(peer.name)
        if old is not None:
            self._gone(old)
            old.close()
        self.peers[peer.name] = peer
        self.silent.discard(peer.name)
        self.pulse.liveness.watch(peer.name, time.monotonic())
        peer.send({"setup": self.site.setup()})
        if peer.name in self.run.ready:
            self._reconcile(peer)
        elif peer.hello.get("generation"):
            peer.send({"reset": True})
        self._tell()

    def _reconcile(self, peer: Peer) -> None:
        """An agent that a former self knew: bring both to the same mind, without touching its workers."""
        hello, run = peer.hello, self.run
        if hello["generation"] == run.generation:
            for report in hello["reports"]:
                self._said(peer, {"ended": report})
        if run.phase is Phase.OPENING and run.group and run.group.store_agent == peer.name:
            peer.send({"open_store": run.generation})
        elif run.phase is Phase.RUNNING and run.group and peer.name in run.group.agents:
            self._reconcile_running(peer)
        elif run.phase is Phase.STOPPING and peer.name in run.waiting_for:
            peer.send({"stop": run.generation})

    def _reconcile_running(self, peer: Peer) -> None:
        generation = self.run.generation
        if int(peer.hello["stopped"]) >= generation:
            self._apply(Left(peer.name))  # it has ended its workers while nobody was there to tell
            peer.send({"reset": True})
        elif peer.hello["generation"] != generation and self.run.group:
            self._do(Start(peer.name, self.run.group, self.store_port, self.run.restarts))

    def _said(self, peer: Peer, message: Message) -> None:
        if self.peers.get(peer.name) is not peer:
            return
        self.pulse.liveness.beat(peer.name, time.monotonic())
        for word, hear in self._words.items():
            if word in message:
                hear(self, peer, message)

    def _hear_ready(self, peer: Peer, message: Message) -> None:
        self.restaffed.pop(peer.name, None)
        self.told.journal("ready", node=peer.name, **message["ready"])
        threads = message["ready"].get("threads")
        if threads:
            names = ", ".join(sorted(set(threads)))
            self.told.note(f"threads in the warm parent on {peer.name} do not live on in workers: {names}")
        self._apply(Joined(peer.name))

    def _hear_store(self, peer: Peer, message: Message) -> None:
        self.store_port = int(message["port"])
        self._apply(StoreOpened(peer.name, int(message["store"]), self.store_port))

    def _hear_ended(self, peer: Peer, message: Message) -> None:
        report = message["ended"]
        failure = self._failure(peer, report) if report["code"] else None
        if failure is not None and report["generation"] == self.run.generation:
            self.told.journal("failed", generation=report["generation"], rank=failure.rank, node=peer.name,
                              code=failure.code, what=failure.what(), noise=failure.noise)  # fmt: skip
        self._apply(
            WorkerEnded(peer.name, report["generation"], report["rank"], report["code"], failure, self._age())
        )

    def _hear_stopped(self, peer: Peer, message: Message) -> None:
        failures = tuple(self._failure(peer, report) for report in message.get("reports", ()))
        self._apply(Stopped(peer.name, int(message["stopped"]), failures))

    def _failure(self, peer: Peer, report: Message) -> Failure:
        return read_failure(
            int(report["rank"]), peer.name, int(report["code"]), str(report.get("traceback", "")),
            oom=bool(report.get("oom")), why=str(report.get("why", "")),
        )  # fmt: skip

    def _hear_note(self, peer: Peer, message: Message) -> None:
        self.told.note(str(message["note"]))

    def _hear_broken(self, peer: Peer, message: Message) -> None:
        """A node on which nothing can be started, or killed, is no node for this run."""
        self.told.note(f"{peer.name}: {message['broken']}")
        self.excluded.append(peer.name)
        self.silent.add(peer.name)
        peer.close()

    def _hear_signal(self, peer: Peer, message: Message) -> None:
        self.told.journal("signal", node=peer.name, signal=message["signal"])
        if not self.run.leaving:
            asyncio.ensure_future(self._slurm_wants_nodes_back())  # noqa: RUF006

    def _hear_step(self, peer: Peer, message: Message) -> None:
        if message.get("generation") == self.run.generation:
            self.marks.step(int(message["step"]), time.monotonic())

    def _hear_grant(self, peer: Peer, message: Message) -> None:
        """May a worker of this generation commit what it wrote? Only while the generation is the present one."""
        ok = self.run.phase is Phase.RUNNING and message["generation"] == self.run.generation
        why = "" if ok else f"generation {message['generation']} is over"
        peer.send({"granted": {"number": message["grant"], "ok": ok, "why": why}})

    _words = {
        "ready": _hear_ready, "store": _hear_store, "ended": _hear_ended, "stopped": _hear_stopped, "note": _hear_note,
        "broken": _hear_broken, "signal": _hear_signal, "step": _hear_step, "grant": _hear_grant,
    }  # fmt: skip

    def _gone(self, peer: Peer) -> None:
        if self.peers.get(peer.name) is peer:
            self._lost(peer.name, "its agent is gone", silent=False)

    def _silent(self, agent: str, why: str) -> None:
        self._lost(agent, why, silent=True)

    def _lost(self, agent: str, why: str, silent: bool) -> None:
        peer = self.peers.pop(agent, None)
        self.pulse.liveness.forget(agent)
        self.jobs.agent_left(agent)
        if silent:
            self.silent.add(agent)
        if self.end is None:
            self.lost_nodes += agent in self.run.ready
            self.told.journal("lost", node=agent, why=why)
        self._apply(Left(agent))
        if peer is not None:
            peer.close()

    # Deciding and doing

    def _apply(self, event: Event) -> None:
        before = self.run
        self.run, orders = advance(self.run, event)
        if self.run is before and not orders:
            return
        for order in orders:
            self._note_order(order)
        self._keep()
        for order in orders:
            self._do(order)
        self._watch_gathering()
        self._tell()

    def _note_order(self, order: Order) -> None:
        if isinstance(order, OpenStore) and self.run.group:
            group = self.run.group
            self.told.journal(
                "generation", generation=group.generation, nodes=list(group.agents), restarts=self.run.restarts,
                nproc_per_node=group.nproc_per_node, wanted=self.run.shape.max_nodes,
            )  # fmt: skip

    def _do(self, order: Order) -> None:
        if isinstance(order, OpenStore):
            self._send(order.agent, {"open_store": order.generation})
        elif isinstance(order, Start):
            self._start(order)
        elif isinstance(order, Stop):
            self._send(order.agent, {"stop": order.generation})
        elif isinstance(order, Wait):
            self.told.journal("pause", seconds=order.seconds)
            asyncio.get_running_loop().call_later(order.seconds, self._apply, Waited())
        elif isinstance(order, Exclude):
            self._exclude(order.agent)
        elif isinstance(order, Release):
            asyncio.ensure_future(self._move())  # noqa: RUF006
        elif isinstance(order, Finish):
            self.end = order
            self.over.set()

    def _send(self, agent: str, message: Message) -> None:
        if agent in self.peers:
            self.peers[agent].send(message)

    def _start(self, order: Start) -> None:
        group = order.group
        self.began = time.monotonic()
        self.marks, self.hanging = Marks(self.site.hang_timeout_s, self.began), False
        self.started = self.started or time.time()
        if order.agent not in self.peers or any(agent not in self.peers for agent in group.agents):
            return  # one of them is just being lost: what follows from that comes at once
        hosts = tuple(self.peers[agent].address for agent in group.agents)
        seats = Seats(group.generation, hosts, group.nproc_per_node, order.store_port, order.restarts)
        first = next(place.first_rank for place in group.places if place.agent == order.agent)
        found = self.peers[order.agent].hello["found"]
        workers = [
            {"rank": rank, "env": {**self.site.worker_env(seats, rank, found), **self._own_env(seats)}}
            for rank in range(first, first + group.nproc_per_node)
        ]
        others = [list(peer.probe) for name, peer in self.peers.items() if name != order.agent]
        self._send(order.agent, {"start": {"generation": group.generation, "workers": workers, "peers": others}})

    def _own_env(self, seats: Seats) -> dict[str, str]:
        return {
            RUN: self.folder.run,
            GENERATION: str(seats.generation),
            WANTED_NODES: str(self.run.shape.max_nodes),
        }

    def _exclude(self, agent: str) -> None:
        self.told.note(f"{agent} was the first to fail twice running: the run goes on without it")
        self.excluded.append(agent)
        self.silent.add(agent)
        self._send(agent, {"finish": 0})

    def _watch_gathering(self) -> None:
        """An elastic run that could start smaller does so after a while."""
        run = self.run
        could = run.phase is Phase.GATHERING and not run.smaller and len(run.ready) >= run.shape.min_nodes
        if could and self.gather_timer is None:
            self.gather_timer = asyncio.get_running_loop().call_later(GATHER_S, self._gave_up_waiting)
        elif not could and self.gather_timer is not None:
            self.gather_timer.cancel()
            self.gather_timer = None

    def _gave_up_waiting(self) -> None:
        self.gather_timer = None
        self._apply(GaveUpWaiting())

    # Slurm

    def job_granted(self, job: Job) -> None:
        self.told.journal("granted", job=job.id, nodes=list(job.nodes), role=job.role)
        if job.role in (MAIN, NEXT):
            self.silent.clear()
            self._apply(Moved())
        self._staff()

    def job_refused(self, job: Job, why: str) -> None:
        self.told.journal("refused", role=job.role, why=why)
        if job.role == MAIN:
            self.run, orders = advance(self.run, Cancelled())
            self.end = Finish(1, why=f"Slurm refused: {why}")
            self.over.set()
        elif job.role == NEXT:
            asyncio.get_running_loop().call_later(ASK_SLURM_S, self._ask_for_nodes, NEXT)

    def job_over(self, job: Job, state: JobState) -> None:
        self.told.journal("job over", job=job.id, role=job.role, state=state.value)
        if job.role == JOIN:
            self._keep()
        elif state is JobState.CANCELLED and not self.run.leaving:
            self._apply(Cancelled())
        elif not any(each.role == NEXT for each in self.jobs.jobs):
            self._ask_for_nodes(NEXT)

    def step_ended(self, job: Job) -> None:
        asyncio.get_running_loop().call_later(0.05, self._staff)

    async def _slurm_wants_nodes_back(self) -> None:
        """An agent was signalled: the time is nearly up, we are preempted, or the user has cancelled."""
        await self.jobs.check()
        if self.end is not None or self.run.leaving or self.run.exit_code is not None:
            return
        self._apply(Leaving())
        if self.site.own_job is None:
            self.jobs.ask(NEXT, suspects=self.excluded)
            self._keep()

    async def _move(self) -> None:
        """Give the nodes back; the next job starts when none of ours is left."""
        for peer in list(self.peers.values()):
            peer.send({"finish": 0})
        if self.site.own_job is not None:
            self.end = Finish(75, why="goes on in the next job")
            self.over.set()
            return
        await self.jobs.give_back([job for job in self.jobs.jobs if job.role != NEXT])
        if not any(job.role == NEXT for job in self.jobs.jobs):
            self._ask_for_nodes(NEXT)
        self._keep()

    def _staff(self) -> None:
        """Agents on every node of ours that should have one, and one-node jobs for what is missing beyond that."""
        if self.end is not None or self.run.leaving:
            return
        for job in self.jobs.jobs:
            nodes = [node for node in self.jobs.unstaffed(job, self.peers, self.silent) if self._may_restaff(node)]
            if job.asking is None and nodes:
                self.jobs.staff(job, nodes)
        self._ask_for_missing()
        self._keep()
        self._tell()

    def _may_restaff(self, node: str) -> bool:
        self.restaffed[node] = self.restaffed.get(node, 0) + 1
        if self.restaffed[node] > MAX_RESTAFF:
            self.silent.add(node)
        return node not in self.silent and node not in self.excluded

    def _ask_for_missing(self) -> None:
        if any(job.role in (MAIN, NEXT) and not job.nodes for job in self.jobs.jobs) or not self.jobs.jobs:
            return
        there = {*self.peers, *self.jobs.expected(self.peers)} - set(self.excluded)
        asked = sum(job.role == JOIN and not job.nodes for job in self.jobs.jobs)
        for _ in range(self.run.shape.max_nodes - len(there) - asked):
            self.jobs.ask(JOIN, suspects=self.excluded, members=sorted(there))

    # Looking after things

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            if self.folder.cancel.exists():
                self._apply(Cancelled())
            self._staff()
            self._look_for_hang()

    async def _ask(self) -> None:
        while True:
            await asyncio.sleep(ASK_SLURM_S)
            await self.jobs.check()

    def _look_for_hang(self) -> None:
        if self.run.phase is not Phase.RUNNING or self.hanging:
            return
        if self.site.hang_timeout_s:
            self.marks.sign(self.told.last_output(self.run.generation))
        overdue = self.marks.overdue_s(time.monotonic())
        if overdue is not None:
            self.hanging = True
            asyncio.ensure_future(self._end_hang(self.run.generation, overdue))  # noqa: RUF006

    async def _end_hang(self, generation: int, overdue_s: float) -> None:
        why = f"no step for {overdue_s:.0f} s; where the ranks were is in {self.folder.root / 'stacks'}"
        self.told.note(why)
        for agent in self.run.group.agents if self.run.group else ():
            self._send(agent, {"stacks": generation})
        await asyncio.sleep(2.0)  # enough for what answers at all; the rest is stuck for good
        self._apply(Hung(generation, why))

    def _age(self) -> float:
        return time.monotonic() - self.began

    # Telling

    def _keep(self) -> None:
        saved = Saved(
            self.run, self.store_port, self.jobs.saved(), tuple(self.excluded), self.lost_nodes, self.started
        )
        write_saved(self.folder.state, saved)

    def _tell(self) -> None:
        self.told.status(self)

    async def _say_farewell(self) -> int:
        """Nothing of the run is left when this returns."""
        assert self.end is not None
        for peer in list(self.peers.values()):
            peer.send({"finish": self.end.code})
        until = time.monotonic() + FAREWELL_S
        while self.peers and time.monotonic() < until:
            await asyncio.sleep(0.01)
        await self.jobs.give_back(self.jobs.jobs)
        self.told.ended(self, self.end)
        with contextlib.suppress(OSError):
            self.folder.state.unlink()
        return self.end.code


def own_addresses() -> list[str]:
    """Where agents may find us: the addresses of our name first."""
    found: Sequence[Any] = ()
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in found]
    outward = [address for address in addresses if not address.startswith("127.")]
    return list(dict.fromkeys([*outward, *addresses, "127.0.0.1"]))


