"""The agent's management of snapshots.

The agent knows the snapshots on this node and finds the one from which a worker resumes. The work is done by helper
processes that outlive the workers: a saver for each rank that requests one, and one keeper per node. The keeper
computes checksums, sends copies to the buddy node and fetches missing parts from other nodes. The agent opens the
keeper's port, so that other nodes know the port before the keeper starts, and a new keeper has the same port.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
from collections.abc import Callable, Sequence

from dalsegno.runs.agent.orders import ResumeOrder, StartOrder
from dalsegno.train.errors import NotEnoughMemory
from dalsegno.train.keeper.holdings import holdings, listen
from dalsegno.train.keeper.plan import KeeperAddress
from dalsegno.train.memory.files import find_folder, own_folder, safe_name, sweep
from dalsegno.train.memory.safe_steps import SafeSteps, read_safe, render_safe_steps, write_safe
from dalsegno.wire.frames import Message

MAX_WRONG_RANKS, MAX_EVIDENCE = (
    64,
    500,
)  # maximum number of ranks reported as wrong, and maximum characters of the evidence
Answer = Callable[[Message], None]
Fork = Callable[[str, Message, Sequence[int]], bool]  # name, task, open files -> whether a process was forked


class Snapshots:
    """The snapshots of one run on one node. `send` sends a message to the coordinator."""

    def __init__(
        self, run: str, node: str, secret: bytes, socket_name: str, fork: Fork, send: Callable[[Message], None]
    ) -> None:
        self.run, self._node, self._secret = run, node, secret
        self._socket_name, self._fork, self._send = socket_name, fork, send
        self._resume: ResumeOrder | None = None
        self._buddy: KeeperAddress | None = None
        self._generation = 0
        self._keeper: Answer | None = None  # sends orders to the keeper, once it is connected
        self._keeper_asked = False
        self._listener = listen()
        self._shares = True  # whether nodes of the run exchange snapshots
        self._orders: list[Message] = []  # orders for a keeper that has not connected yet
        self._fetching: dict[int, Answer] = {}
        self._numbers = itertools.count(1)

    def keep_local(self) -> None:
        """Stop exchanging snapshots with other nodes. This is needed if other users may know the run's secret."""
        self._shares, self._secret = False, secrets.token_bytes(32)
        self._listener.close()
        self._listener = socket.create_server(("127.0.0.1", 0))

    def take_secret(self, secret: bytes) -> None:
        """Set the run's secret, which some agents receive only in the coordinator's greeting."""
        if self._shares and secret != self._secret:
            self._secret = secret
            if self._keeper is not None:
                self._configure_keeper()

    # Orders from the coordinator

    def start(self, run: str, order: StartOrder) -> None:
        """Prepare a generation. Under torchrun, the id `run`, which workers use, differs from the agents' run id."""
        self.run, self._generation, self._resume, self._buddy = run, order.generation, order.resume, order.buddy
        self.note_safe(order.safe)
        if self._keeper is not None:
            self._configure_keeper()
        elif order.resume is not None:
            self._start_keeper()  # start it now, because other nodes may send copies at once

    def pair(self, buddy: KeeperAddress | None) -> None:
        """Set the keeper that holds copies of this node's snapshots."""
        self._buddy = buddy
        if self._keeper is not None:
            self._configure_keeper()

    def note_safe(self, safe: SafeSteps | None) -> None:
        """Write the file that tells workers which snapshots they must not overwrite. With None, remove the file."""
        with contextlib.suppress(OSError, NotEnoughMemory):  # if /dev/shm is full, the previous file stays valid
            if safe is not None:
                write_safe(own_folder() / safe_name(self.run), safe)
            elif (folder := find_folder()) is not None:
                (folder / safe_name(self.run)).unlink(missing_ok=True)

    def held(self) -> list[dict[str, object]]:
        """Return the snapshots in this node's memory, as a message for the coordinator."""
        return [each.to_message() for each in holdings(self.run)]

    def hello(self) -> Message:
        """Return the part of the agent's hello that is about snapshots."""
        folder = find_folder()
        safe = read_safe(folder / safe_name(self.run)) if folder else None
        port = int(self._listener.getsockname()[1]) if self._shares else 0
        return {"held": self.held(), "keeper": port, "safe": render_safe_steps(safe) if safe else None}

    def end(self) -> None:
        """Remove all snapshots of the run from this node's memory."""
        with contextlib.suppress(OSError):
            sweep(self.run)

    # Messages from workers, savers and the keeper

    def handle(self, message: Message, answer: Answer) -> None:
        if "saver" in message:
            self._give_saver(int(message["saver"]), answer)
        elif "resume" in message:
            self._find(int(message["resume"]), answer)
        elif "snapshot" in message:
            self._order(message)
        elif "keeper" in message:
            self._keeper_came(answer)
        elif "kept" in message:
            self._send({"kept": self.held()})
        elif "fetched" in message:
            self._fetched(message)
        elif "resumed" in message:
            source = "memory" if message.get("source") == "memory" else "disk"
            resumed, generation = int(message["resumed"]), int(message["generation"])
            self._send({"resumed": resumed, "source": source, "generation": generation})
        elif "verified" in message:
            self._send({"verified": int(message["verified"]), "generation": int(message["generation"])})
        elif "corruption" in message:
            found, generation = message["corruption"], int(message["generation"])
            ranks = [int(rank) for rank in found["ranks"][:MAX_WRONG_RANKS]]
            corruption = {"step": int(found["step"]), "ranks": ranks, "text": str(found["text"])[:MAX_EVIDENCE]}
            self._send({"corruption": corruption, "generation": generation})
        elif "trouble" in message:
            self._send({"note": f"copies of snapshots: {message['trouble']}"})

    def _give_saver(self, rank: int, answer: Answer) -> None:
        """Start a saver and send the name of its socket, which is already listening, to the worker."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            # The name is random, because other users must not guess it.
            name = f"{self._socket_name}.saver.{secrets.token_hex(8)}"
            sock.bind("\0" + name)
            sock.listen(1)
            task = {"kind": "saver", "name": f"ds:save{rank}", "door": self._socket_name}
            forked = self._fork(f"saver:{name}", task, [sock.fileno()])
        answer({"saver": name} if forked else {"saver": ""})

    def _find(self, requesting: int, answer: Answer) -> None:
        """Tell the worker which snapshot to resume from, and fetch it if needed.

        Without a snapshot, the worker reads from disk.
        """
        resume = self._resume
        if resume is None:
            answer({"own": ""})
            return
        rank = resume.source_ranks.get(requesting, requesting)
        folder = find_folder()
        here = [each for each in holdings(self.run, folder) if each.place == (resume.generation, resume.step)]
        own = next((each.name for each in here if each.own and each.rank == rank), None)
        shared = next((each.name for each in here if each.shared), None)
        if folder and own and shared:
            answer({"step": resume.step, "own": str(folder / str(own)), "shared": str(folder / str(shared))})
            return
        if not self._shares:
            answer({"own": ""})
            return
        number = next(self._numbers)
        self._fetching[number] = answer
        sources = {"own": [] if own else resume.own.get(requesting, ()), "shared": [] if shared else resume.shared}
        order = {"number": number, "rank": rank, "generation": resume.generation, "step": resume.step}
        self._order({"fetch": {**order, **{part: [list(each) for each in found] for part, found in sources.items()}}})

    def _fetched(self, data: Message) -> None:
        answer = self._fetching.pop(int(data["fetched"]), None)
        if answer is not None and self._resume is not None and data.get("ok"):
            answer({"step": self._resume.step, "own": data["own"], "shared": data["shared"]})
        elif answer is not None:
            self._send({"note": f"could not fetch a snapshot: {data.get('why')}"})
            answer({"own": ""})

    # The keeper: its start, its orders and its end

    def _order(self, order: Message) -> None:
        if self._keeper is not None:
            self._keeper(order)
            return
        self._orders.append(order)
        self._start_keeper()
        if not self._keeper_asked:
            self._give_up_fetching()

    def can_fork(self) -> None:
        """Handle a new warm parent.

        Start a keeper if this node holds snapshots, because other nodes may request them.
        """
        if self.held():
            self._start_keeper()

    def _start_keeper(self) -> None:
        if not self._keeper_asked:
            task: Message = {"kind": "keeper", "name": "ds:keeper", "door": self._socket_name}
            self._keeper_asked = self._fork("keeper", task, [self._listener.fileno()])

    def _keeper_came(self, answer: Answer) -> None:
        self._keeper = answer
        self._configure_keeper()
        orders, self._orders = self._orders, []
        for order in orders:
            answer(order)
        self._send({"kept": self.held()})

    def keeper_gone(self) -> None:
        """Handle the loss of the keeper. The next order for a keeper starts a new one."""
        self._keeper, self._keeper_asked = None, False
        self._orders.clear()
        self._give_up_fetching()

    def _give_up_fetching(self) -> None:
        fetching, self._fetching = self._fetching, {}
        for answer in fetching.values():
            answer({"own": ""})

    def _configure_keeper(self) -> None:
        assert self._keeper is not None
        buddy = list(self._buddy) if self._buddy and self._shares else None
        resumed = self._resume.step if self._resume else None
        terms = {"run": self.run, "node": self._node, "secret": self._secret.hex(), "generation": self._generation}
        self._keeper({"keep": {**terms, "buddy": buddy, "resumed": resumed}})
