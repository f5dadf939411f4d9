"""The coordinator of a run. It receives events from agents and Slurm, and executes the state machine's orders."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable

from dalsegno.errors import DalsegnoError
from dalsegno.runs.coordinator.agents import agents as orders
from dalsegno.runs.coordinator.agents.agents import Peer, RunAgents, StartMessages, setup_message
from dalsegno.runs.coordinator.agents.connect import Connect, listen_again, read_connect, write_connect
from dalsegno.runs.coordinator.agents.hangs import HangWatch
from dalsegno.runs.coordinator.agents.messages import (
    AgentMessage,
    AllStopped,
    Broken,
    CorruptionFound,
    EndedWorker,
    GrantRequested,
    MemoryHeld,
    NodeActivity,
    NoticeRead,
    ParentDied,
    Ready,
    Signalled,
    StacksTaken,
    Stepped,
    StepVerified,
    WorkersResumed,
    to_event,
)
from dalsegno.runs.coordinator.background import BackgroundTasks, Batch, PacedAction
from dalsegno.runs.coordinator.generations.admission import NodeAdmission
from dalsegno.runs.coordinator.generations.events import (
    REPEATED,
    AgentGone,
    AgentJoined,
    Cancelled,
    Event,
    Exclude,
    Finish,
    GenerationStopped,
    OpenStore,
    Order,
    PauseOver,
    ReleaseNodes,
    RunMoved,
    SaveGeneration,
    Start,
    StopGeneration,
    Wait,
)
from dalsegno.runs.coordinator.generations.generations import GenerationPhase, Run, Step, advance, confirm_stops
from dalsegno.runs.coordinator.generations.memory import MemoryTable
from dalsegno.runs.coordinator.generations.standbys import GpuUse, StandbyLost, StandbyPlan, StandbyReady
from dalsegno.runs.coordinator.nodes.node_source import NodeSource, RunControl
from dalsegno.runs.coordinator.reports.goodput import ProgressWriter
from dalsegno.runs.coordinator.reports.report import RunFacts, StatusWriter, log
from dalsegno.runs.coordinator.saved_state import SavedRun, find_saved, unfinished, write_saved
from dalsegno.runs.coordinator.shutdown import catch_signals, finish_agents
from dalsegno.runs.coordinator.site import CHECK_S, RunTerms
from dalsegno.runs.coordinator.trust import StateTrust
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.status import RunCause
from dalsegno.train.contract import SAVED
from dalsegno.wire.frames import Message

ADOPT_S = 10.0  # agents that do not reconnect to a new coordinator within this time are lost
GATHER_S = 30.0  # how long an elastic run waits for all its nodes before it starts with fewer


class Coordinator:
    """The coordinator of one run, from its first agent to its end."""

    def __init__(
        self,
        site: RunTerms,
        node_source: Callable[[RunControl], NodeSource],
        gather_s: float = GATHER_S,
        status_writer: StatusWriter | None = None,
    ) -> None:
        self.site, self.folder = site, site.folder
        self.run = Run(site.shape, site.max_restarts)
        self.lost_nodes = 0
        self.started: float | None = None
        self.status_writer = status_writer or StatusWriter(site)
        self.node_source = node_source(self)
        self.agents: RunAgents
        self.admission = NodeAdmission(self, gather_s)
        self.hangs = HangWatch(self, site.hang_timeout_s)
        self.standbys = StandbyPlan(site.standby)
        self.memory = MemoryTable()
        self.progress_writer = ProgressWriter(site.folder.progress)
        self.trust = StateTrust(self, self.memory)
        self.end: Finish | None = None
        self.suspended = False  # whether the coordinator ends while the run continues later
        self.is_shut_down = False
        self._left: set[str] = set()  # nodes that the run has left and whose agents may still be connected
        self._starts = StartMessages(site)
        self._saving = PacedAction(self.save_state)
        self._reporting = PacedAction(self._update_status)
        self._over = asyncio.Event()
        self._background = BackgroundTasks()
        self._stops = Batch[GenerationStopped](lambda stops: self._advance(confirm_stops(self.run, stops), True))

    async def serve(self) -> int:
        """Coordinate the run until it has ended and return its exit code."""
        saved = await find_saved(self.site, self.node_source.release_all, self.note)
        await self.open()
        if saved is None:
            self.journal(RunEvent.BEGAN, host=socket.gethostname(), pid=os.getpid())
            self.node_source.begin()
        else:
            await self._take_over(saved)
        catch_signals(self.site, self._start_leaving)
        await self._background.until(self._over, self.agents.watch(), self._check(), self._ask_slurm())
        assert self.end is not None
        await finish_agents(self.agents, self.memory, self.node_source, self.end, suspended=self.suspended)
        self._report_end(self.end)
        self.agents.close()
        return self.end.code

    def _start_leaving(self, job: int = 0, node: str = "") -> None:
        if not self.closing:
            self.node_source.leaving(job, node)

    async def open(self) -> None:
        """Listen, if possible on a port that agents of the previous coordinator try, and write the connection file."""
        known = read_connect(self.folder)
        self.agents = RunAgents(self.folder.run, known.secret, self.site.timing, self)
        port = await listen_again(known, self.agents.open, self.note)
        write_connect(self.folder, Connect(known.secret, port))

    # Taking over from a previous coordinator

    async def _take_over(self, saved: SavedRun) -> None:
        """Continue the run from a saved state. Agents reconnect by themselves; an agent that does not is lost."""
        self.run = saved.run
        self.trust.restore(saved.trust)
        self.lost_nodes, self.started = saved.lost_nodes, saved.started
        self.memory.used.update(saved.used)
        self.journal(RunEvent.CAME_BACK, host=socket.gethostname(), pid=os.getpid())
        if await self.node_source.adopt(saved.jobs, saved.excluded, saved.lost_since):
            asyncio.get_running_loop().call_later(ADOPT_S, self._lose_missing)
        else:
            self._start_over()
        for order in unfinished(self.run):
            self._execute(order)
        if self.run.pausing:
            self.apply(PauseOver())

    def _start_over(self) -> None:
        for agent in self.run.ready:
            self.apply(AgentGone(agent))
        self.apply(RunMoved())
        self.node_source.begin()

    def _lose_missing(self) -> None:
        for agent in [agent for agent in self.run.ready if agent not in self.agents.peers]:
            self.agents.lose(agent, "its agent did not reconnect", silent=False)

    def _reconcile(self, peer: Peer) -> None:
        """Repeat the current order to a reconnected agent, or reset the agent if its workers have ended."""
        run = self.run
        if run.group is None or peer.name not in run.group.agents:
            return
        if run.phase is GenerationPhase.RUNNING and not peer.hello.still_runs(run.generation):
            self.apply(AgentGone(peer.name))  # otherwise the other nodes would wait for workers that no longer exist
            peer.send({"reset": True})
        elif (message := orders.current_order(run, run.group, peer.name)) is not None:
            peer.send(message)

    # Agents: connections, messages and losses

    def agent_connected(self, peer: Peer) -> None:
        if self.end is not None:  # the agent connected after the run had ended
            self.memory.used.discard(peer.name)
            peer.send({"finish": self.end.code})
            return
        again = bool(peer.hello.generation) and peer.name not in self.run.ready
        if not self.node_source.agent_connected(peer.name, again):
            self.continue_without(peer.name, "it was lost, and Slurm has marked it down")
            return
        keeper = (peer.host, peer.hello.keeper) if peer.hello.keeper else None
        self.memory.update(peer.name, peer.hello.held, keeper, peer.hello.safe)
        peer.send(setup_message(self.site))
        if peer.name in self.run.ready:
            self._readmit(peer)
        elif peer.hello.generation:
            peer.send({"reset": True})
        self._reporting.request()

    def _readmit(self, peer: Peer) -> None:
        """Accept an agent of the previous coordinator, and handle reports about workers that ended in the meantime."""
        if peer.hello.generation == self.run.generation:
            for report in peer.hello.reports:
                self.agent_message(peer, EndedWorker(report))
        self._reconcile(peer)

    def agent_message(self, peer: Peer, message: AgentMessage) -> None:
        event = to_event(peer.name, message, self.hangs.age_s, healthy=peer.name not in self.node_source.unhealthy)
        self.status_writer.record_message(self.run.generation, peer.name, message, event)
        if isinstance(message, Ready):
            self.node_source.agent_ready(peer.name)
            if not message.warm:
                self.memory.forget_keeper(peer.name)
        elif isinstance(message, ParentDied):
            peer.send({"reset": True})  # the agent drops its orders in progress
        elif isinstance(message, Broken):
            self._exclude(peer.name, message.why)
        elif isinstance(message, Signalled):
            self._start_leaving(peer.hello.job, peer.name)
        elif isinstance(message, NoticeRead) and message.notice:
            self.node_source.notice_read(peer.name, message.notice)
        elif isinstance(message, Stepped):
            self._stepped(message)
        elif isinstance(message, WorkersResumed) and (why := self.memory.explain_resume(message)):
            self.note(why)
        elif isinstance(message, (GpuUse, StandbyReady, StandbyLost)):
            node, age_s = self.status_writer.name_of(peer.name), self.hangs.age_s
            self.status_writer.note_standby(self.standbys.record(message, node, self.run.generation, age_s))
        elif isinstance(message, StacksTaken):
            self.hangs.stacks_done(peer.name)
        elif isinstance(message, NodeActivity):
            self.hangs.worked(message.generation, message.ranks)
        elif isinstance(message, GrantRequested):
            peer.send(self.trust.answer_grant(message, self.end is not None, lambda: self._write_state(durable=True)))
        elif isinstance(message, StepVerified):
            self.trust.record_verified(message)
        elif isinstance(message, CorruptionFound):
            self.trust.judge(message, self.node_source)
        elif isinstance(message, (AllStopped, MemoryHeld)):
            self.memory.update(peer.name, message.held)
            self._send_memory_updates()
        if isinstance(event, AgentJoined):
            self.admission.admit(event)
        elif isinstance(event, GenerationStopped):
            self._stops.add(event)
        elif event is not None and not self.hangs.defer(event):
            self.apply(event)

    def _stepped(self, message: Stepped) -> None:
        self.hangs.stepped(message.generation, message.step)
        if message.over:
            self.hangs.stop_timer(message.generation)
        if message.generation == self.run.generation:
            self.progress_writer.record_step(message)
            self.standbys.record_step(message.generation, message.step)

    def _send_memory_updates(self) -> None:
        if self.run.phase is GenerationPhase.RUNNING and self.run.group is not None:
            for agent, message in self.memory.updates(self.run.group, time.monotonic()):
                self.agents.send(agent, message)

    def agent_lost(self, agent: str, why: str, silent: bool) -> None:
        self.node_source.agent_lost(agent, silent)
        self.hangs.stacks_done(agent)
        self.memory.lost(agent)
        if not self.closing and agent not in self._left:
            self.lost_nodes += agent in self.run.ready
            self.status_writer.lost(self.run, agent, why)
        self._left.discard(agent)
        self.apply(AgentGone(agent))

    def message_too_long(self, agent: str, detail: str) -> None:
        """End the run. An agent that misses an order waits forever, and a restart would send the same message."""
        self.stop(1, f"a message to {agent} is too long: {detail}")

    def continue_without(self, node: str, why: str) -> None:
        """Continue without this node. The end of its agent is expected from now on and is not a loss."""
        self._left.add(node)
        self.journal(RunEvent.LEFT, node=node, why=why)
        self.note(f"{node}: {why}; the run continues without it")
        self.agents.send(node, {"finish": 0})
        self.apply(AgentGone(node))

    # Events and orders

    def apply(self, event: Event) -> None:
        """Apply an event. Generation stops that agents confirmed earlier are applied first."""
        log.debug("event: %s", type(event).__name__)
        self._stops.flush()
        self._advance(advance(self.run, event), isinstance(event, REPEATED))

    def _advance(self, step: Step, repeated: bool) -> None:
        before = self.run
        self.run, orders = step
        if self.run is before and not orders:
            return
        self.progress_writer.changed(before, self.run)
        if self.run.phase is GenerationPhase.RUNNING:
            self.started = self.started or time.time()
        if self.run.group is not None and self.run.group is not before.group:
            self.memory.used.update(self.run.group.agents)
        at_once = bool(orders) or not repeated
        # The state is saved before the orders are executed, because the next coordinator must know them.
        (self._saving.run if at_once else self._saving.request)()
        for order in orders:
            self._execute(order)
        self.admission.watch()
        self._reporting.serve(at_once, self.run.phase in (GenerationPhase.STOPPING, GenerationPhase.OPENING))

    def _execute(self, order: Order) -> None:
        if isinstance(order, OpenStore):
            self.status_writer.generation(self.run)
            self.agents.send(order.agent, {"open_store": order.generation})
        elif isinstance(order, Start):
            self._start_workers(order)
        elif isinstance(order, SaveGeneration):
            orders.order_save(order, self.agents, self.apply)
        elif isinstance(order, StopGeneration):
            self.agents.send(order.agent, {"stop": order.generation})
        elif isinstance(order, Wait):
            self.journal(RunEvent.PAUSE, seconds=order.seconds)
            asyncio.get_running_loop().call_later(order.seconds, self.apply, PauseOver())
        elif isinstance(order, Exclude) and order.until_repaired:
            self.node_source.leave_for_repair(order.agent)
            self.continue_without(order.agent, order.why)
        elif isinstance(order, Exclude):
            self._exclude(order.agent, order.why)
        elif isinstance(order, ReleaseNodes):
            self.agents.send_all({"finish": 0})
            self.run_in_background(self.node_source.move())
        elif isinstance(order, Finish):
            self.finish(order)

    def _start_workers(self, order: Start) -> None:
        if self.run.phase is not GenerationPhase.RUNNING or self.run.group is not order.group:
            return  # a member was lost while earlier orders were sent, so the generation is already being stopped
        self.hangs.generation_started()
        in_memory = self.memory.start(order.group, order.agent, time.monotonic())
        message = self._starts.message(order, self.agents.peers, in_memory, self.trust.state.env)
        if message is not None:
            self.agents.send(order.agent, message)

    def _exclude(self, agent: str, why: str) -> None:
        """Exclude the agent's node from the rest of the run."""
        self.note(f"{agent}: {why}; the run continues without it")
        self.node_source.exclude(agent)
        self.agents.send(agent, {"finish": 0})

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
            self.node_source.check_agents()
            self.hangs.check()
            self._send_memory_updates()
            self.progress_writer.watch_slow_ranks(self.run, self.note, time.monotonic())
            orders.order_standbys(self.site, self.standbys, self.run, self.hangs.age_s, self.agents)
            self._reporting.request()

    async def _ask_slurm(self) -> None:
        while True:
            await asyncio.sleep(self.node_source.ask_again_s)
            await self.node_source.ask_slurm()

    def run_in_background(self, work: Awaitable[None]) -> None:
        self._background.run_in_background(work)

    # Queries from the node source

    @property
    def closing(self) -> bool:
        return self.ending or self.run.leaving

    @property
    def ending(self) -> bool:
        return self.end is not None or self.run.exit_code is not None

    @property
    def present(self) -> frozenset[str]:
        return frozenset(self.agents.peers)

    # Reports and saved state

    def save_state(self) -> None:
        """Save the state for the next coordinator. Ignore errors, because a full disk must not end the run."""
        self._write_state(durable=False)

    def _write_state(self, durable: bool) -> bool:
        """Write the state and return whether that succeeded. With `durable`, the file survives a machine crash."""
        if self.is_shut_down:
            return True
        source, used = self.node_source, tuple(sorted(self.memory.used))
        saved = SavedRun(
            run=self.run, jobs=source.saved(), excluded=tuple(source.excluded), lost_since=dict(source.lost_since),
            lost_nodes=self.lost_nodes, started=self.started, trust=self.trust.state, used=used,
        )  # fmt: skip
        try:
            write_saved(self.folder.state, saved, durable)
        except DalsegnoError:
            return False
        return True

    def _report_end(self, end: Finish) -> None:
        self.save_state()
        self.is_shut_down = True  # connections that break from now on are not reported
        if self.suspended:
            self.status_writer.run_suspended(self._facts(), end.why)
            return
        self.status_writer.ended(self._facts(), end)
        with contextlib.suppress(OSError):
            self.folder.state.unlink()

    def _facts(self) -> RunFacts:
        source = self.node_source
        return RunFacts(
            self.run, self.started, self.lost_nodes, self.ending, self.present,
            source.jobs, source.has_nodes, source.coming, source.waits, source.refused,
            self.progress_writer.slow.lasting,
        )  # fmt: skip

    def _update_status(self) -> None:
        if not self.is_shut_down:
            self.status_writer.status(self._facts())
            if self.node_source.has_nodes and not self.started:
                self.progress_writer.record_grant()
            self.progress_writer.write(last=self.end is not None)

    def send(self, agent: str, message: Message) -> None:
        self.agents.send(agent, message)

    def last_output(self, generation: int) -> float:
        return self.status_writer.last_output(generation)

    def note(self, text: str) -> None:
        self.status_writer.note(text)

    def journal(self, event: RunEvent, **what: object) -> None:
        self.status_writer.journal(event, **what)
