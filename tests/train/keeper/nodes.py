"""A simulated node: a folder for shared memory, and a keeper in its own process. The test acts as the agent."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dalsegno.train.keeper.holdings import StoredSnapshot, holdings, listen
from dalsegno.train.keeper.plan import KeeperAddress
from dalsegno.train.keeper.service import serve
from dalsegno.train.memory.slots import Slots
from dalsegno.train.state import TrainingState
from dalsegno.wire.frames import Message, Reader, send
from tests.train.memory.processes import fork

RUN = "a"
SECRET = "5e" * 32
WAIT_S = 60.0


class Node:
    """Starts the keeper, sends orders, and receives messages in `until`, all in one thread."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.folder, self.pid, self.kept, self.received = folder, 0, [], []  # type: ignore[var-annotated]
        self.all_kept: list[list[Message]] = []
        self._slots: dict[tuple[int, int], Slots] = {}

    def start(self, listener: socket.socket | None = None) -> None:
        """Start the keeper. `listener`: its port, which others may already know."""
        port = (listener or listen()).detach()
        name = f"dalsegno-test-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX) as door:
            door.bind("\0" + name)
            door.listen(1)
            door.settimeout(WAIT_S)
            self.pid = fork(lambda: _run_keeper(name, port, self.folder))
            self._sock, _ = door.accept()
        os.close(port)
        self._reader, self.kept, self.all_kept, self.port = Reader(), [], [], 0
        self.until(lambda: self.port)

    @property
    def address(self) -> KeeperAddress:
        return KeeperAddress("127.0.0.1", self.port, self.name)

    def call(self) -> socket.socket:
        """Return a connection of an unauthenticated caller."""
        return socket.create_connection(self.address[:2], WAIT_S)

    def order(self, message: Message) -> None:
        self._sock.settimeout(WAIT_S)
        send(self._sock, message)

    def keep(self, buddy: KeeperAddress | None = None, generation: int = 1, secret: str = SECRET, **more: Any) -> None:
        terms = {"run": RUN, "node": self.name, "secret": secret, "buddy": buddy, "generation": generation}
        self.order({"keep": {**terms, **more}})

    def ready(self) -> None:
        """Wait until the keeper has processed its orders."""
        self.until(lambda: self.all_kept)

    def commit(self, state: TrainingState, generation: int = 1, slots: int = 2, **more: Any) -> None:
        """Commit a snapshot like a worker, and notify the keeper like its agent."""
        key = (state.rank, generation)
        if key not in self._slots:
            self._slots[key] = Slots(RUN, state.rank, generation, count=slots, folder=self.folder, **more)
        record = self._slots[key].write(state)
        if record is not None:
            self.order({"snapshot": {"path": "", "rank": state.rank, "step": state.step}, "generation": generation})

    def fetch(self, rank: int, step: int, own: Any = (), shared: Any = (), generation: int = 1) -> Message:
        number = len(self.received)
        what = {"number": number, "rank": rank, "generation": generation, "step": step}
        self.order({"fetch": {**what, "own": [*own], "shared": [*shared]}})
        return self.until(lambda: next((one for one in self.received if one.get("fetched") == number), None))

    def until(self, found: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
        """Receive messages until the condition is true, and return its value."""
        end = time.monotonic() + timeout_s
        while not (result := found()):
            left = end - time.monotonic()
            assert left > 0, f"timed out; last kept: {self.kept}"
            self.listen(min(left, 0.05))  # the condition may also depend on files of other nodes
        return result

    def listen(self, seconds: float = 0.0) -> None:
        self._sock.settimeout(max(seconds, 0.001))
        try:
            data = self._sock.recv(1 << 20)
        except TimeoutError:
            return
        assert data, "the keeper has ended"
        for message in self._reader.feed(data):
            self._note(message)

    def _note(self, message: Message) -> None:
        self.received.append(message)
        self.port = message.get("keeper", self.port)
        if "kept" in message:
            self.kept = message["kept"]
            self.all_kept.append(self.kept)

    def sent(self) -> list[int]:
        """Return the local steps that the buddy has acknowledged."""
        return sorted(one["step"] for one in self.kept if one["sent"])

    def copies(self) -> list[StoredSnapshot]:
        return [one for one in self.held() if one.copy]

    def held(self) -> list[StoredSnapshot]:
        return holdings(RUN, self.folder)

    def path(self, one: StoredSnapshot) -> Path:
        return self.folder / str(one.name)

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
            self._sock.close()

    def hang_up(self) -> int:
        """Disconnect like an agent that dies. Return the keeper's exit code."""
        self._sock.close()
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        self.kill()
        for slots in self._slots.values():
            slots.close()


def _run_keeper(name: str, port: int, folder: Path) -> None:
    os.closerange(3, port)  # closes inherited descriptors, because a copy would keep a connection open
    os.closerange(port + 1, 1024)
    serve(name, socket.socket(fileno=port), folder, nice=0)
