"""The run agent. srun starts one on every node of a run, as the user. The coordinator tells it when to start workers.

The agent knows only its own part of the run. It does not import torch; its warm parent does. If the coordinator dies,
the agent keeps its workers running for a while, so that a restarted coordinator can continue with them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from dalsegno.log import start_logging
from dalsegno.runs.agent.evidence import environment, own_processes
from dalsegno.runs.agent.gpu_use import read_gpu_use
from dalsegno.runs.agent.link import CoordinatorLink, HeartbeatSender, beat_key
from dalsegno.runs.agent.log_stream import LogStream, left_folders
from dalsegno.runs.agent.notice_watch import NoticeWatch, find_cloud_file
from dalsegno.runs.agent.orders import read_keeper, read_setup, read_standby, read_start
from dalsegno.runs.agent.snapshots import Snapshots
from dalsegno.runs.agent.step_reports import StepReports
from dalsegno.runs.agent.warm import adopt_orphans
from dalsegno.runs.agent.worker_processes import trim_reports
from dalsegno.runs.agent.worker_socket import WorkerSocket
from dalsegno.runs.agent.workers import Workers
from dalsegno.train.contract import RUN, TERMINATED
from dalsegno.train.memory import files
from dalsegno.train.memory.files import sweep_abandoned
from dalsegno.train.memory.safe_steps import parse_safe_steps
from dalsegno.wire.frames import Message

log = logging.getLogger("run-agent")

# Leftovers from killed agents on this node


STALE_S = 24 * 3600.0


def sweep(run: str, node: str) -> list[int]:
    """Kill the processes that this run left on this node, and return their PIDs. Remove the run's log folders too.

    With cgroup process tracking, Slurm leaves no such processes. Otherwise, orphans in their own sessions may survive.
    Their environment shows to which run and node they belong.
    """
    marks = {f"{RUN}={run}".encode(), f"SLURMD_NODENAME={node}".encode()}
    left = [pid for pid in own_processes() if marks <= environment(pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for folder in left_folders(run, node):
        shutil.rmtree(folder, ignore_errors=True)
    return left


def sweep_stale(now: float | None = None, folder: Path | None = None) -> list[str]:
    """Remove snapshots of this user's dead runs from memory and return the ids of these runs.

    A run counts as dead if its snapshots are a day old and it has no process here. When a run ends, it removes its
    snapshots, but not from nodes that it has lost. If a lost node has a node agent, that agent removes the snapshots
    within a minute.
    """
    sweep_abandoned(folder)
    before = (time.time() if now is None else now) - STALE_S
    old = [run for run in files.find_forgotten_runs(before, folder) if not run.startswith(files.ALONE)]
    alive = {entry.partition(b"=")[2] for pid in own_processes() for entry in environment(pid)} if old else set()
    gone = [run for run in old if run.encode() not in alive]
    for run in gone:
        files.sweep(run, folder)
    return gone


# Reachability: a live kernel completes a TCP connect even if its processes are stopped or starved


Address = tuple[str, int]
_UNDER_WAY = (errno.EINPROGRESS, errno.EWOULDBLOCK)


DIAL_AGAIN_S = 0.03  # minimum interval between connection attempts to an address that has not answered
MAX_DIALS = 12


def reachable(addresses: Iterable[Address], timeout_s: float) -> set[Address]:
    """Return the addresses that accept or refuse a connection in time. A refusal also shows that the host is alive.

    Addresses that do not answer are tried again, because the network may lose the first packets, and TCP repeats them
    only after a second.
    """
    waiting, answered = set(addresses), set[Address]()
    now = time.monotonic()
    until, interval_s = now + timeout_s, max(DIAL_AGAIN_S, timeout_s / MAX_DIALS)
    with selectors.DefaultSelector() as selector:
        dial_at = left = 0.0
        while waiting and left >= 0:
            if now >= dial_at:
                dial_at = now + interval_s
                for address in waiting:
                    _dial(selector, address, answered)
            left = until - time.monotonic()
            # On a busy machine this process may wake up late, so check the sockets once more after the deadline.
            for key, _ in selector.select(max(min(left, dial_at - now), 0.0)):
                _take_answer(selector, key, answered)
            waiting, now = waiting - answered, time.monotonic()
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return answered


def _dial(selector: selectors.BaseSelector, address: Address, answered: set[Address]) -> None:
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    code = sock.connect_ex(address)
    if code in _UNDER_WAY:
        selector.register(sock, selectors.EVENT_WRITE, address)
        return
    sock.close()
    if code in (0, errno.ECONNREFUSED):
        answered.add(address)


def _take_answer(selector: selectors.BaseSelector, key: selectors.SelectorKey, answered: set[Address]) -> None:
    sock = key.fileobj
    assert isinstance(sock, socket.socket)
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code in (0, errno.ECONNREFUSED):
        answered.add(key.data)
    selector.unregister(sock)
    sock.close()


# The agent of one node


TICK_S = 0.2
BEAT_MESSAGE_S = 5.0  # interval of heartbeats over TCP, for networks that drop the UDP heartbeats
# The agent checks whether it is isolated after the coordinator has been silent for CHECK_AFTER. The check takes at most
# CHECK_FOR. Both are fractions of the coordinator's timeout for a silent host, so that the check ends in time.
CHECK_AFTER, CHECK_FOR = 0.45, 0.2
CAUGHT = (signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
MAX_FOUND_CHARS = 4096  # longer values are ignored, because they cannot be a list of devices
# Variables of the agent's environment from which the workers' variables are derived.
FOUND = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


class RunAgent:
    """The agent of one run on one node."""

    def __init__(self, connect: Message, node: str, unlock: Callable[[Message], bytes] | None = None) -> None:
        self.run, self.node = str(connect["run"]), node
        secret = bytes.fromhex(connect["secret"])
        self.link = CoordinatorLink(secret, connect["addresses"], int(connect["port"]), node, unlock)
        self.link.on_close = self._unwatch
        self.heartbeats = HeartbeatSender(node)
        self.selector = selectors.DefaultSelector()
        # The name is random, because another user could bind a predictable one first. Socket names must be short.
        name = f"dalsegno.{os.getuid()}.{self.run[:40]}.{secrets.token_hex(8)}"
        self.worker_socket = WorkerSocket(name, self.selector, self._handle_worker)
        self.probe = self._open_probe()
        self.workers = Workers(node, self.worker_socket.name, self.selector, self._send)
        self.snapshots = Snapshots(
            self.run, node, secret, self.worker_socket.name, self.workers.fork_helper, self._send
        )
        self.workers.held, self.workers.helper_ended = self.snapshots.held, self._helper_ended
        self.workers.can_fork = self.snapshots.can_fork
        self.step_reports, self.notices = StepReports(), NoticeWatch(node, find_cloud_file(os.environ))
        self.peers: tuple[tuple[str, int], ...] = ()
        self.watched: socket.socket | None = None
        self.lost_at = time.monotonic()
        self.looked_at = 0.0
        self.spoke_at = time.monotonic()
        self.stream: LogStream | None = None
        self.grants: dict[int, Callable[[Message], None]] = {}
        self.exit_code: int | None = None
        self.signals: list[int] = []
        self.terminated = False
        self.replaced = False
        self.cut_off = False  # whether at least half of the nodes are unreachable; if so, do not requeue the job
        self.final_command: Sequence[str] = ()  # a command to run if no coordinator returns
        self.caught = set(CAUGHT)
        self.orders: dict[str, Callable[..., None]] = {
            "setup": self._set_up,
            "reset": lambda _: self.workers.reset(),
            "open_store": self.workers.open_store,
            "start": self._start,
            "stop": self.workers.stop,
            "save": self.workers.save,
            "standby": lambda data: self.workers.prepare_standbys(read_standby(data)),
            "stacks": self.workers.capture_stacks,
            "work": self.workers.report_work,
            "granted": self._granted,
            "logged": lambda data: self.stream.confirm(*data) if self.stream else None,
            "buddy": lambda data: self.snapshots.pair(read_keeper(data.get("address"))),
            "safe": lambda data: self.snapshots.note_safe(parse_safe_steps(data)),
            "replaced": self._yield_memory,
            "finish": self._finish,
        }

    def serve(self) -> int:
        """Serve until the run is over; return the exit code. Without a coordinator, end after a while or on SIGTERM."""
        adopt_orphans()
        sweep(self.run, self.node)
        sweep_stale()
        self._catch_signals()
        self.notices.start()
        while self.exit_code is None:
            if self.link.sock is None:
                self._find_coordinator()
            for key, _ in self.selector.select(self._tick_s()):
                key.data()
            self._handle_signals()
            self.workers.repeat_signals()
            self._check_silence()
            self._send_heartbeat()
        self.workers.end_everything()
        if not self.replaced:
            self.snapshots.end()
        if self.stream is not None:
            self.stream.close(self.link.send)
            self.link.finish()
        return self.exit_code

    # Connection to the coordinator

    def _find_coordinator(self) -> None:
        self._disconnect()
        if not self.link.connect(self._hello()) or self.link.sock is None:
            time.sleep(TICK_S)
            return
        self.snapshots.take_secret(self.link.secret)
        self.heartbeats.aim(self.link.peer, self.link.port, beat_key(self.link.session))
        log.info("connected to %s:%d", self.link.peer, self.link.port)
        self.watched, self.cut_off = self.link.sock, False
        if self.stream is not None:
            self.stream.rewind()
        self.notices.repeat()
        self.selector.register(self.link.sock, selectors.EVENT_READ, self._read_coordinator)

    def _disconnect(self) -> None:
        self.link.close()

    def _unwatch(self) -> None:
        """Deny pending requests to commit, and unregister the socket before it is closed.

        The next socket may get the same file descriptor.
        """
        if self.watched is not None:
            self.selector.unregister(self.watched)
            self.watched, self.lost_at = None, time.monotonic()
            grants, self.grants = self.grants, {}
            for answer in grants.values():
                answer({"granted": False, "why": "the coordinator is lost"})

    def _send(self, message: Message) -> None:
        """Send a message about the workers to the coordinator."""
        self.link.send(message)

    def _hello(self) -> Message:
        current = self.workers.current
        return {
            "run": self.run,
            "pid": os.getpid(),
            "job": int(os.environ.get("SLURM_JOB_ID") or 0),
            "probe": self.probe,
            "found": {
                name: value for name in FOUND if len(value := os.environ.get(name, "")) in range(1, MAX_FOUND_CHARS)
            },
            "generation": current.generation,
            "stopped": self.workers.stopped,
            "reports": trim_reports(list(current.reports.values())),
            **self.snapshots.hello(),
        }

    def _read_coordinator(self) -> None:
        if self.link.sock is not None:
            for message in self.link.receive():
                self._execute(message)

    def _execute(self, message: Message) -> None:
        for key, execute in self.orders.items():
            if key in message:
                log.debug("order of the coordinator: %s", key)
                execute(message[key])

    def _set_up(self, data: Message) -> None:
        """Start the warm parent. If this node cannot access the run folder, logs are sent to the coordinator."""
        setup = read_setup(data)
        self.heartbeats.interval_s, self.step_reports.interval_s = setup.beat_s, setup.report_s
        if self.stream is None and not os.path.isdir(setup.folder):
            self.stream = LogStream(self.run, self.node)
        self.workers.set_up(replace(setup, folder=self.stream.folder) if self.stream else setup)

    def _send_heartbeat(self) -> None:
        if self.stream is not None:
            self.stream.pump(self.link.send)
        if self.link.sock is not None and (notice := self.notices.take()):
            self.link.send({"notice": notice})
        if time.monotonic() - self.spoke_at > BEAT_MESSAGE_S:
            self.spoke_at = time.monotonic()
            self.link.send({"beat": True})

    def _start(self, data: Message) -> None:
        order = read_start(data)
        self.peers = order.peers
        self.snapshots.start(order.workers[0].env.get(RUN, self.run), order)
        self.workers.start(order)

    def _finish(self, code: int) -> None:
        self.exit_code = 0

    def _yield_memory(self, data: bool) -> None:
        """Keep the snapshots in memory when this agent ends, for the agent that replaces it."""
        self.replaced = True

    def _helper_ended(self, name: str) -> None:
        if name == "keeper":
            self.snapshots.keeper_gone()

    # Messages from workers

    def _handle_worker(self, message: Message, answer: Callable[[Message], None]) -> None:
        """Handle a message from a worker. The user's code must not be able to end the agent or the coordinator."""
        try:
            data = {word: int(message[word]) for word in ("step", "grant", "generation") if word in message}
            gpu = {"gpu": read_gpu_use(message["gpu"])} if "gpu" in message else {}
            self.snapshots.handle(message, answer)
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        if gpu:
            self.link.send(gpu)
        if "step" in data:
            report = self.step_reports.join(message, data["step"], data.get("generation"), time.monotonic())
            if report is not None:
                self.link.send(report)
        if "grant" in data:
            self._ask_grant(data["grant"], answer)

    def _ask_grant(self, generation: int, answer: Callable[[Message], None]) -> None:
        """Ask the coordinator, which knows the current generation, whether a worker may commit its checkpoint."""
        if self.link.sock is None:
            answer({"granted": False, "why": "the coordinator is not connected"})
            return
        number = max(self.grants, default=0) + 1
        self.grants[number] = answer
        self.link.send({"grant": number, "generation": generation})

    def _granted(self, data: Message) -> None:
        answer = self.grants.pop(int(data["number"]), None)
        if answer is not None:
            answer({"granted": bool(data["ok"]), "why": str(data["why"])})

    # Signals to the agent

    def _catch_signals(self) -> None:
        read, write = os.pipe()
        for end in (read, write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in self.caught:
            signal.signal(number, lambda caught, frame: self.signals.append(caught))
        self.selector.register(read, selectors.EVENT_READ, lambda: os.read(read, 4096))

    def _handle_signals(self) -> None:
        """Forward SIGTERM and SIGUSR2 to the workers, which Slurm does not signal, and tell the coordinator."""
        while self.signals:
            number = self.signals.pop(0)
            if number in (signal.SIGTERM, signal.SIGUSR2):
                self.link.send({"signal": signal.Signals(number).name})
                self.workers.signal(number)
            self.terminated = self.terminated or number == signal.SIGTERM
        if self.terminated and self.link.sock is None:  # end now: no coordinator is connected that could decide
            self.exit_code = TERMINATED

    # Silence of the coordinator

    def _check_silence(self) -> None:
        now = time.monotonic()
        setup = self.workers.setup
        if self.watched is None and now - self.lost_at > setup.absence_s:
            self.exit_code, self.final_command = 1, () if self.cut_off else setup.final_command
            return
        gone_s = setup.gone_s
        silence = now - max(self.heartbeats.last_seen, self.link.last_seen, self.looked_at)
        if gone_s and silence > CHECK_AFTER * gone_s:
            self._check_isolation(CHECK_FOR * gone_s)

    def _tick_s(self) -> float:
        """Return the loop's interval, shorter while workers run and the coordinator is silent, to detect isolation."""
        quiet = time.monotonic() - max(self.heartbeats.last_seen, self.link.last_seen) > 2 * TICK_S
        return TICK_S / 4 if quiet and self.workers.current.running() else TICK_S

    def _check_isolation(self, timeout_s: float) -> None:
        """Disconnect if the coordinator's host does not answer.

        If this node reaches at most half of the nodes, itself included, end the workers too.
        """
        coordinator = (self.link.peer, self.link.port)
        everyone = {coordinator, *self.peers}
        answered = reachable(everyone, timeout_s)
        self.looked_at = time.monotonic()
        if coordinator in answered:
            return
        log.warning(
            "the coordinator at %s:%d does not answer; %d of %d peers do", *coordinator, len(answered), len(self.peers)
        )
        self.cut_off = (len(answered) + 1) * 2 <= max(len(self.peers) + 1, 2)
        if self.cut_off:
            self.workers.end()
        self._disconnect()

    def _open_probe(self) -> int:
        """Open a port on which others can check whether this host is alive, and return its number."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.bind(("", 0))
        sock.listen(512)
        sock.setblocking(False)
        self.selector.register(sock, selectors.EVENT_READ, lambda: _take_and_close(sock))
        return int(sock.getsockname()[1])


def _take_and_close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.accept()[0].close()


def main(arguments: list[str]) -> int:
    """Run `run-agent RUN`, with the run's secret and the coordinator's addresses on standard input."""
    connect = json.load(sys.stdin)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    # Only warnings are logged, because the same log contains srun's messages, which must stay easy to find.
    start_logging(f"run-agent@{node}", level=logging.WARNING)
    agent = RunAgent(connect, node)
    code = agent.serve()
    if agent.final_command:
        os.execvp(agent.final_command[0], list(agent.final_command))
    return code
