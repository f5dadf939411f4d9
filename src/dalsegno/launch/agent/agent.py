"""The run agent: one on every node of a run, as the user, started by srun. Forks workers when its coordinator says so.

It imports no torch: that is its warm parent's part. It knows nothing of the run but its place in it, and outlives the
coordinator's absence for a while, so that a coordinator which was killed finds its workers running.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dalsegno.launch.agent import stacks
from dalsegno.launch.agent.beats import Heart
from dalsegno.launch.agent.crew import Crew, Report, Worker
from dalsegno.launch.agent.door import Door
from dalsegno.launch.agent.frames import Message
from dalsegno.launch.agent.link import Link
from dalsegno.launch.agent.parent import WarmParent, catches, kill_below, kill_groups, plain_parent
from dalsegno.launch.agent.reach import reached
from dalsegno.launch.agent.warm import adopt_orphans
from dalsegno.train.contract import AGENT, TERMINATED

TICK_S = 0.2
SETTLE_S = 5.0
HEARD_NAMES = (
    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip
STORE_FILE = str(Path(__file__).with_name("store.py"))


class Agent:
    """One node's part of one run."""

    def __init__(self, connect: Message, node: str) -> None:
        self.run, self.node = str(connect["run"]), node
        secret = bytes.fromhex(connect["secret"])
        self.link = Link(secret, connect["addresses"], int(connect["port"]), node)
        self.heart = Heart(secret, node)
        self.selector = selectors.DefaultSelector()
        self.door = Door(f"dalsegno.{os.getuid()}.{self.run}.{os.getpid()}", self.selector, self._hear_worker)
        self.probe = self._open_probe()
        self.setup: Message = {}
        self.parent: WarmParent | None = None
        self.warm = False  # workers are forked, else they are programs of their own
        self.ready = False
        self.queue: list[Callable[[], None]] = []  # what waits for the parent
        self.pending: set[str] = set()  # forks that were asked for and not yet told of
        self.crew = Crew(0)
        self.peers: list[tuple[str, int]] = []
        self.stopped = 0
        self.watched: socket.socket | None = None
        self.lost_at = time.monotonic()
        self.looked_at = 0.0
        self.grants: dict[int, Callable[[Message], None]] = {}
        self.exit_code: int | None = None
        self.signals: list[int] = []

    def serve(self) -> int:
        """Until the run is over, or the coordinator has been gone for too long."""
        adopt_orphans()
        self._catch_signals()
        while self.exit_code is None:
            if self.link.sock is None:
                self._find_coordinator()
            for key, _ in self.selector.select(TICK_S):
                key.data()
            self._handle_signals()
            self._watch_out()
        self._end_everything()
        return self.exit_code

    # The coordinator

    def _find_coordinator(self) -> None:
        self._forget_coordinator()
        if not self.link.connect(self._hello()):
            time.sleep(TICK_S if self.ready else 0.05)
            return
        self.heart.aim(self.link.peer, self.link.port)
        self.watched = self.link.sock
        self.selector.register(self.link.sock, selectors.EVENT_READ, self._hear_coordinator)
        for message in self.link.early():
            self._obey(message)

    def _forget_coordinator(self) -> None:
        self.link.close()
        if self.watched is not None:
            self.selector.unregister(self.watched)
            self.watched, self.lost_at = None, time.monotonic()

    def _hello(self) -> Message:
        return {
            "run": self.run,
            "pid": os.getpid(),
            "job": int(os.environ.get("SLURM_JOB_ID") or 0),
            "probe": self.probe,
            "found": {name: os.environ[name] for name in HEARD_NAMES if name in os.environ},
            "ready": self.ready,
            "generation": self.crew.generation,
            "stopped": self.stopped,
            "reports": list(self.crew.reports.values()),
        }

    def _hear_coordinator(self) -> None:
        if self.link.sock is not None:
            for message in self.link.receive():
                self._obey(message)

    def _obey(self, message: Message) -> None:
        for word, order in self._orders.items():
            if word in message:
                order(self, message[word])

    def _set_up(self, setup: Message) -> None:
        self.setup = setup
        if self.parent is None:
            self._start_parent(bool(setup["modules"]))
        elif self.ready:
            self._tell_ready({})

    def _reset(self, _: object) -> None:
        """We were given up, or another coordinator knows nothing of us: nothing of before may run on."""
        self._end_workers()
        self.stopped = max(self.stopped, self.crew.generation)
        self.crew = Crew(0)
        if self.ready:
            self._tell_ready({})

    def _finish(self, code: int) -> None:
        self.exit_code = 0

    # The warm parent

    def _start_parent(self, warm: bool) -> None:
        env, cwd = {**os.environ, **self.setup["env"]}, self.setup["cwd"]
        self.warm, self.ready = warm, False
        try:
            if not os.path.isdir(cwd):
                raise OSError(f"there is no folder {cwd} on this node")
            modules = self.setup["modules"] if warm else []
            self.parent = WarmParent(self.setup["python"], modules, env, cwd) if warm else plain_parent(env, cwd)
        except OSError as error:
            if not warm:
                return self._give_up(f"cannot start workers: {error}")
            return self._fall_back(f"cannot start {self.setup['python']}: {error}")
        self.selector.register(self.parent.sock, selectors.EVENT_READ, self._hear_parent)
        return None

    def _fall_back(self, why: str) -> None:
        self.link.send({"note": f"nothing is imported ahead on {self.node}: {why}"})
        self._start_parent(False)

    def _give_up(self, why: str) -> None:
        self.link.send({"broken": why})
        self.exit_code = 1

    def _hear_parent(self) -> None:
        assert self.parent is not None
        messages = self.parent.receive()
        if messages is None:
            self._parent_died()
        for message in messages or ():
            if "warm" in message:
                self._parent_is_warm(message["warm"])
            elif "forked" in message:
                self._forked(message["forked"], message["pid"])
            elif "ended" in message:
                self._process_ended(message["ended"], message["code"])

    def _parent_is_warm(self, told: Message) -> None:
        if not told["ok"]:
            self.link.send({"note": f"nothing is imported ahead on {self.node}: {told['why']}"})
            self.warm = False  # it can still become a program
        self._tell_ready(told)
        waiting, self.queue = self.queue, []
        for each in waiting:
            each()

    def _tell_ready(self, told: Message) -> None:
        self.ready = True
        self.link.send({"ready": {"warm": self.warm, "seconds": told.get("seconds"), "threads": told.get("threads")}})

    def _parent_died(self) -> None:
        """Its workers died with it. Another takes its place; what cannot even import starts workers as programs."""
        assert self.parent is not None
        was_ready = self.ready
        self._drop_parent()
        for worker in self.crew.running():
            self._report(worker, -int(signal.SIGKILL), "the warm parent was killed")
        if self.exit_code is None:
            if was_ready or not self.warm:
                self._start_parent(self.warm)
            else:
                self._fall_back("the Python that imports ahead died")

    def _drop_parent(self) -> None:
        if self.parent is not None:
            self.selector.unregister(self.parent.sock)
            self.parent.end()
            self.parent, self.ready = None, False
            self.pending.clear()

    # A generation

    def _open_store(self, generation: int) -> None:
        self._when_ready(lambda: self._open_store_now(generation))

    def _open_store_now(self, generation: int) -> None:
        """The socket is open when the port is told, so no one can take it; who connects early waits in its queue."""
        family = socket.AF_INET6 if ":" in self.link.peer else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind(("", 0))
            port = int(sock.getsockname()[1])
            if self.setup["store"]:
                sock.listen(4096)
                self._fork(f"store:{generation}", self._store_task(port), [sock.fileno()])
        self.link.send({"store": generation, "port": port})

    def _store_task(self, port: int) -> Message:
        log = self._log_path(0, "store")
        task = {"kind": "store", "name": "ds:store", "port": port, "cwd": "/", "stdout": log, "stderr": log}
        if self.warm:
            return task
        args = [STORE_FILE, "{file}", str(port)]
        env = {**os.environ, **self.setup["env"]}
        return {**task, "kind": "program", "script": self.setup["python"], "args": args, "env": env}

    def _start(self, order: Message) -> None:
        self._when_ready(lambda: self._start_now(order))

    def _start_now(self, order: Message) -> None:
        generation = int(order["generation"])
        if generation <= max(self.stopped, self.crew.generation):
            return  # told twice, or stopped while it waited for the parent
        self.peers = [(str(host), int(port)) for host, port in order["peers"]]
        self.crew = Crew(generation)
        for each in order["workers"]:
            worker = self.crew.add(int(each["rank"]), self._log_path(generation, f"rank{each['rank']}"))
            self._fork(f"{generation}:{worker.rank}", self._task(worker, each["env"]))

    def _task(self, worker: Worker, env: Message) -> Message:
        """What one worker runs, and with which variables; later ones go before earlier ones."""
        own = {AGENT: self.door.name, "TORCHELASTIC_ERROR_FILE": worker.error_file}
        python = [] if self.warm or not self.setup["is_python"] else [self.setup["python"], "-u"]
        module = ["-m"] if self.setup["module"] and python else []
        argv = [*python, *module, self.setup["script"], *self.setup["args"]]
        return {
            "kind": "script" if self.warm else "program",
            "name": f"ds:w{worker.rank}",
            "env": {**os.environ, **self.setup["env"], **own, **env},
            "cwd": self.setup["cwd"],
            "script": argv[0],
            "args": argv[1:],
            "module": self.setup["module"],
            "stdout": worker.log,
            "stderr": worker.log,
            "stacks": self._stacks_path(worker.rank),
        }

    def _fork(self, name: str, task: Message, files: Sequence[int] = ()) -> None:
        if self.parent is not None:
            self.pending.add(name)
            self.parent.fork(dict(task, id=name), files)

    def _forked(self, name: str, pid: int) -> None:
        self.pending.discard(name)
        generation, _, rank = name.partition(":")
        if generation == str(self.crew.generation):
            self.crew.workers[int(rank)].pid = pid

    def _process_ended(self, pid: int, code: int) -> None:
        worker = self.crew.by_pid(pid)
        if worker is not None and worker.rank not in self.crew.reports:
            self._report(worker, code)

    def _report(self, worker: Worker, code: int, why: str = "") -> None:
        report: Report = self.crew.ended(worker, code, why)
        self._drop_empty(worker.rank)
        self.link.send({"ended": report})

    def _stop(self, generation: int) -> None:
        """Kill all of it at once, and say so when nothing of it is left."""
        if generation < self.crew.generation:
            return
        hurt = self.crew.hurt()
        self.stopped = generation
        left = self._end_workers()
        if left:
            self.link.send({"broken": f"processes that cannot be killed: {left}"})
        else:
            self.link.send({"stopped": generation, "reports": hurt})

    def _end_workers(self) -> list[int]:
        self._settle()
        kill_groups([worker.pid for worker in self.crew.running() if worker.pid])
        ranks = list(self.crew.workers)
        left = kill_below(keep=[self.parent.pid] if self.parent else [])
        self.crew.workers.clear()
        for rank in ranks:
            self._drop_empty(rank)
        return left

    def _settle(self) -> None:
        """Hear of every fork that is under way, so that none comes after the killing."""
        until = time.monotonic() + SETTLE_S
        while self.pending and self.parent is not None:
            self.parent.sock.settimeout(max(0.01, until - time.monotonic()))
            self._hear_parent()
            if time.monotonic() > until:
                self._drop_parent()
                self._start_parent(self.warm)
                return
        if self.parent is not None:
            self.parent.sock.settimeout(None)

    def _end_everything(self) -> None:
        self._end_workers()
        self._drop_parent()
        kill_below(keep=[])

    # Workers' own words

    def _hear_worker(self, message: Message, answer: Callable[[Message], None]) -> None:
        if "step" in message:
            self.link.send({"step": message["step"], "generation": message.get("generation")})
        if "grant" in message:
            number = len(self.grants) + 1
            self.grants[number] = answer
            if self.link.sock is None:
                answer({"granted": False, "why": "the coordinator is not there"})
            self.link.send({"grant": number, "generation": message["grant"]})

    def _granted(self, told: Message) -> None:
        answer = self.grants.pop(int(told["number"]), None)
        if answer is not None:
            answer({"granted": bool(told["ok"]), "why": str(told.get("why", ""))})

    # Signals

    def _catch_signals(self) -> None:
        read, write = os.pipe()
        for end in (read, write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda caught, frame: self.signals.append(caught))
        self.selector.register(read, selectors.EVENT_READ, lambda: os.read(read, 4096) and None)

    def _handle_signals(self) -> None:
        while self.signals:
            number = self.signals.pop(0)
            if number in (signal.SIGTERM, signal.SIGUSR2):
                self.link.send({"signal": signal.Signals(number).name})
                self._tell_workers(number)
            if number == signal.SIGTERM and self.link.sock is None:
                self.exit_code = TERMINATED

    def _tell_workers(self, number: int) -> None:
        """Only those that listen: the others would die of it, and lose what they have done since they last saved."""
        for worker in self.crew.running():
            if worker.pid and catches(worker.pid, number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, number)

    def _tell(self, name: str) -> None:
        self._tell_workers(int(signal.Signals[name]))

    # Silence

    def _watch_out(self) -> None:
        now = time.monotonic()
        if self.link.sock is None and now - self.lost_at > self.setup.get("absence_s", 60):
            self.exit_code = 1
            return
        gone_s = float(self.setup.get("gone_s", 3.0))
        silence = now - max(self.heart.heard, self.link.heard, self.looked_at)
        if silence > 0.6 * gone_s and self.crew.running():
            self._look_around(0.25 * gone_s)

    def _look_around(self, timeout_s: float) -> None:
        """Silence: is the coordinator gone, or are we? Cut off from most others, we stop before they go on without us."""
        home = (self.link.peer, self.link.port)
        answered = reached([home, *self.peers], timeout_s)
        self.looked_at = time.monotonic()
        if home in answered:
            return
        if not self.peers or len(answered) + 1 <= (len(self.peers) + 1) / 2:
            self._end_workers()
            self.stopped = max(self.stopped, self.crew.generation)
            self._forget_coordinator()

    # The small things

    def _when_ready(self, do: Callable[[], None]) -> None:
        if self.ready:
            do()
        else:
            self.queue.append(do)

    def _open_probe(self) -> int:
        """A port that only has to be there: whether our kernel answers on it is what is asked."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.bind(("", 0))
        sock.listen(512)
        sock.setblocking(False)
        self.selector.register(sock, selectors.EVENT_READ, lambda: _take_and_close(sock))
        return int(sock.getsockname()[1])

    def _log_path(self, generation: int, name: str) -> str:
        folder = os.path.join(self.setup["folder"], "logs", *([f"g{generation:04d}"] if generation else []))
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, f"{name}.log")

    def _stacks_path(self, rank: int) -> str:
        folder = os.path.join(self.setup["folder"], "stacks")
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, f"g{self.crew.generation:04d}-rank{rank}.txt")

    def _drop_empty(self, rank: int) -> None:
        """A file for stacks that were never asked for."""
        path = self._stacks_path(rank)
        with contextlib.suppress(OSError):
            if os.stat(path).st_size == 0:
                os.unlink(path)

    def _capture_stacks(self, generation: int) -> None:
        if generation == self.crew.generation:
            for worker in self.crew.running():
                stacks.capture(worker.pid, self._stacks_path(worker.rank))
        self.link.send({"stacks": generation})

    _orders = {
        "setup": _set_up,
        "reset": _reset,
        "open_store": _open_store,
        "start": _start,
        "stop": _stop,
        "tell": _tell,
        "stacks": _capture_stacks,
        "granted": _granted,
        "finish": _finish,
    }


def _take_and_close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.accept()[0].close()


def main(arguments: list[str]) -> int:
    """`run-agent RUN`, with the run's secret and the coordinator's addresses on standard input."""
    connect = json.load(sys.stdin)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return Agent(connect, node).serve()
