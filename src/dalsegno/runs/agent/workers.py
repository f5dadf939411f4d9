"""All processes that an agent starts: the warm parent and, through it, stores, workers, standbys and helpers."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence

from dalsegno.runs.agent import evidence
from dalsegno.runs.agent.evidence import await_dumps, catches, descendants, measure_work, request_dump, size_of
from dalsegno.runs.agent.gpu_watch import GpuWatch, load_of
from dalsegno.runs.agent.orders import Setup, StandbyOrder, StartOrder
from dalsegno.runs.agent.parent import WarmParent, kill_below, kill_groups, plain_parent
from dalsegno.runs.agent.standbys import Standbys
from dalsegno.runs.agent.worker_processes import (
    GenerationWorkers,
    WorkerProcess,
    run_files,
    store_task,
    trim_reports,
    worker_task,
)
from dalsegno.wire.frames import Message

SETTLE_S = 5.0


class Workers:
    """Starts and ends the processes of one node. `send` sends a message to the coordinator."""

    def __init__(
        self, node: str, socket_name: str, selector: selectors.BaseSelector, send: Callable[[Message], None]
    ) -> None:
        self.node, self.socket_name, self.selector, self.send = node, socket_name, selector, send
        self.setup = Setup()
        self.parent: WarmParent | None = None
        self.warm = False  # whether workers are forked from the warm parent; otherwise they start as separate programs
        self.ready = False
        self.current = GenerationWorkers(0)  # workers of the current generation
        self.stopped = 0  # the last generation whose processes have all ended
        self._waiting: list[Callable[[], None]] = []  # calls to make when the parent is ready
        self._signalled: dict[int, set[int]] = {}  # signal -> PIDs of the workers that have received it
        self._forking: set[str] = set()  # names of forks that are requested but not confirmed
        self.standbys = Standbys(selector, self._fork, send)
        self._gpus = GpuWatch()
        self._helpers: dict[int, str] = {}  # PID -> name of a process that outlives a generation: a saver or the keeper
        self.helper_ended: Callable[[str], None] = lambda name: None
        self.can_fork: Callable[[], None] = lambda: None  # called when a warm parent is ready to fork
        self.held: Callable[[], list[dict[str, object]]] = list  # returns the snapshots in this node's memory

    # The warm parent

    def set_up(self, setup: Setup) -> None:
        self.setup = setup
        if self.parent is None:
            self._start_parent(bool(setup.modules))
        elif self.ready:
            self._report_ready({})

    def _start_parent(self, warm: bool) -> None:
        setup = self.setup
        env, cwd = {**os.environ, **setup.env}, setup.cwd
        self.warm, self.ready = warm, False
        try:
            if not os.path.isdir(cwd):
                raise OSError(f"folder {cwd} does not exist on this node")
            if warm:
                self.parent = WarmParent(setup.python, setup.modules, env, cwd, setup.stdin)
            else:
                self.parent = plain_parent(env, cwd, setup.stdin)
        except OSError as error:
            if warm:
                self._fall_back(f"cannot start {setup.python}: {error}")
            else:
                self.send({"broken": f"cannot start workers: {error}"})
            return
        self.selector.register(self.parent.sock, selectors.EVENT_READ, self._read_parent)

    def _fall_back(self, why: str) -> None:
        self.send({"note": f"modules are not preloaded on {self.node}: {why}"})
        self._start_parent(False)

    def _read_parent(self, wait: bool = False) -> None:
        messages = self.parent.receive(wait) if self.parent else []
        if messages is None:
            self._parent_died()
        for message in messages or ():
            if "warm" in message:
                self._parent_is_warm(message["warm"])
            elif "forked" in message:
                self._forked(message["forked"], message["pid"])
            elif "ended" in message:
                self._ended(message["ended"], message["code"])

    def _parent_is_warm(self, data: Message) -> None:
        if not data["ok"]:
            self.send({"note": f"modules are not preloaded on {self.node}: {data['why']}"})
            self.warm = False  # this parent can start separate programs, but not fork workers
        self._report_ready(data)
        if self.warm:
            self.can_fork()
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each()

    def _report_ready(self, data: Message) -> None:
        self.ready = True
        self.send({"ready": {"warm": self.warm, "seconds": data.get("seconds"), "threads": data.get("threads")}})

    def _parent_died(self) -> None:
        """End the generation, whose workers died with the parent, and start another parent.

        If the old parent died during imports, the new one imports nothing.
        """
        was_ready = self.ready
        self._drop_parent()
        self.end()
        if was_ready:
            self.send({"cold": "its warm parent was killed"})
        if was_ready or not self.warm:
            self._start_parent(self.warm)
        else:
            self._fall_back("the warm parent died")

    def _drop_parent(self) -> None:
        if self.parent is not None:
            self.selector.unregister(self.parent.sock)
            self.parent.end()
            self.parent, self.ready = None, False
            self._forking.clear()
            self.standbys.drop()
            gone, self._helpers = self._helpers, {}
            for name in gone.values():
                self.helper_ended(name)

    def _when_ready(self, do: Callable[[], None]) -> None:
        if self.ready:
            do()
        else:
            self._waiting.append(do)

    # Starting and ending generations

    def open_store(self, generation: int) -> None:
        self._when_ready(lambda: self._open_store(generation))

    def _open_store(self, generation: int) -> None:
        """Open the store's socket, then report its port.

        The open socket reserves the port, and ranks that start early can already connect to it. If the agent does not
        run the store, only a free port is chosen.
        """
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.bind(("", 0))
            port = int(sock.getsockname()[1])
            if self.setup.store:
                sock.listen(4096)
                self._fork(f"store:{generation}", store_task(self.setup, self.warm, port), [sock.fileno()])
        self.send({"store": generation, "port": port})

    def start(self, order: StartOrder) -> None:
        self._when_ready(lambda: self._start(order))

    def _start(self, order: StartOrder) -> None:
        generation = order.generation
        if generation <= max(self.stopped, self.current.generation):
            return  # the order is a duplicate, or its generation was stopped before the parent was ready
        self.current = GenerationWorkers(generation)
        self._signalled.clear()
        for local_rank, each in enumerate(order.workers):
            is_torch = self.warm and "TORCHELASTIC_RUN_ID" in each.env
            files = dict(each.files) or run_files(self.setup.folder, generation, each.rank, flight=is_torch)
            if not is_torch:
                files.pop("flight", None)  # only a forked worker with torch can dump its flight recorder
            worker = self.current.add(each.rank, **files)
            task = worker_task(self.setup, self.warm, worker, each, self.socket_name)
            worker.pid = self.standbys.start(local_rank, task)
            if not worker.pid:
                self._fork(f"{generation}:{each.rank}", task)

    def prepare_standbys(self, order: StandbyOrder) -> None:
        """Prepare standby workers, if workers are forked and not started as separate programs."""
        if self.warm and self.ready:
            self.standbys.prepare(order, {**os.environ, **self.setup.env})

    def _fork(self, name: str, task: Message, files: Sequence[int] = ()) -> None:
        if self.parent is not None:
            self._forking.add(name)
            self.parent.fork(dict(task, id=name), files)

    def fork_helper(self, name: str, task: Message, files: Sequence[int]) -> bool:
        """Fork a process that outlives the workers; return False if there is no warm parent."""
        if not (self.warm and self.ready):
            return False
        self._fork(f"beside:{name}", task, files)
        return True

    def _forked(self, name: str, pid: int) -> None:
        self._forking.discard(name)
        generation, _, rest = name.partition(":")
        if generation == str(self.current.generation):
            self.current.workers[int(rest)].pid = pid
        elif generation == "standby":
            self.standbys.forked(int(rest), pid)
        elif generation == "beside":
            self._helpers[pid] = rest

    def _ended(self, pid: int, code: int) -> None:
        if pid in self._helpers:
            self.helper_ended(self._helpers.pop(pid))
        self.standbys.ended(pid, code)
        worker = self.current.by_pid(pid)
        if worker is not None and worker.rank not in self.current.reports:
            report = self.current.ended(worker, code)
            self.standbys.note_end(report)
            self._drop_empty_stacks(worker)
            self.send({"ended": report})

    def stop(self, generation: int) -> None:
        """Kill all workers of a generation at once, then report whether all of them have ended."""
        if generation < self.current.generation:
            return
        failing = self.current.failing()
        left = self.end()
        self.stopped = max(self.stopped, generation)
        if left:
            self.send({"broken": f"processes that cannot be killed: {left}"})
        else:
            self.send({"stopped": generation, "reports": trim_reports(failing), "held": self.held()})

    def end(self) -> list[int]:
        """Kill all processes except the parent, helpers and standbys. Return the PIDs that could not be killed."""
        self._settle()
        running = self.current.running()
        kill_groups([worker.pid for worker in running if worker.pid])
        left = kill_below(keep=[self.parent.pid, *self._helpers, *self.standbys.pids] if self.parent else [])
        self.stopped = max(self.stopped, self.current.generation)
        for worker in running:
            self._drop_empty_stacks(worker)
        self.current.workers.clear()
        return left

    def _settle(self) -> None:
        """Wait until all requested forks are confirmed, so that none starts after the kill. If that takes too long,
        replace the parent."""
        until = time.monotonic() + SETTLE_S
        while self._forking and self.parent is not None:
            self.parent.sock.settimeout(max(0.01, until - time.monotonic()))
            self._read_parent(wait=True)
            if time.monotonic() > until:
                self._drop_parent()
                self._start_parent(self.warm)
        if self.parent is not None:
            self.parent.sock.settimeout(None)

    def reset(self) -> None:
        """End all workers, drop pending orders, and report that this node is ready for new ones."""
        self._waiting.clear()
        self.end()
        self.current = GenerationWorkers(0)
        if self.ready:
            self._report_ready({})

    def end_everything(self) -> None:
        self.end()
        self._drop_parent()
        kill_below(keep=[])

    # Signals, stacks and activity of running workers

    def signal(self, number: int) -> None:
        """Send a signal to the workers that have a handler for it.

        The signal would kill the other workers, and unsaved work would be lost.
        """
        self._signalled[number] = set()
        self.repeat_signals()

    def save(self, generation: int) -> None:
        """Tell the workers of a generation to save and exit, as Slurm does before a time limit."""
        if generation == self.current.generation:
            self.signal(signal.SIGUSR2)

    def repeat_signals(self) -> None:
        """Send pending signals to workers that have installed a handler in the meantime.

        Call this in every turn of the loop.
        """
        for number, signalled in self._signalled.items():
            for worker in self.current.running():
                if worker.pid and worker.pid not in signalled and catches(worker.pid, number):
                    signalled.add(worker.pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.pid, number)

    def capture_stacks(self, generation: int) -> None:
        if generation == self.current.generation:
            running = [worker for worker in self.current.running() if worker.pid]
            asked = [(worker.pid, worker.flight, size_of(worker.flight)) for worker in running if worker.flight]
            for worker in running:
                if worker.flight:
                    request_dump(worker.flight_socket)
            evidence.capture_all((worker.pid, worker.stacks) for worker in running)
            await_dumps(asked)
        self.send({"stacks": generation})

    def report_work(self, generation: int) -> None:
        """Report the activity of the running workers, so that the coordinator can detect idle workers."""
        if generation == self.current.generation:
            loads, work = self._gpus.take(), {}
            for worker in self.current.running():
                if worker.pid:
                    pids = [worker.pid, *descendants(worker.pid)]
                    work[str(worker.rank)] = [*measure_work(pids), *load_of(pids, loads)]
            self.send({"worked": generation, "ranks": work})

    def _drop_empty_stacks(self, worker: WorkerProcess) -> None:
        """Remove the stacks file of a worker if no stacks were captured."""
        with contextlib.suppress(OSError):
            if os.stat(worker.stacks).st_size == 0:
                os.unlink(worker.stacks)
