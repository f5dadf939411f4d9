"""The agent's management of standby workers: prepare them, give them a script, and end those that cannot be used."""

from __future__ import annotations

import selectors
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dalsegno.runs.agent.evidence import lacked_gpu_memory
from dalsegno.runs.agent.gpu_use import settings_of
from dalsegno.runs.agent.orders import StandbyOrder
from dalsegno.wire.frames import BadFrame, Message, Reader, send

MAX_STANDBYS = 64


@dataclass(eq=False)
class Standby:
    """One standby worker. Its pid is 0 until it is forked."""

    local_rank: int
    sock: socket.socket
    settings: Mapping[str, str]  # the settings with which CUDA and NCCL were started
    pid: int = 0
    ready: bool = False
    reader: Reader = field(default_factory=Reader)


class Standbys:
    """The standby workers of one node, at most one for each local rank."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        fork: Callable[[str, Message, Sequence[int]], None],
        send: Callable[[Message], None],
    ) -> None:
        self._selector, self._fork, self._send = selector, fork, send
        self._standbys: dict[int, Standby] = {}
        self._changes: Mapping[str, str | None] = {}
        self._refused = False  # whether standbys are disabled for the rest of the run

    @property
    def pids(self) -> list[int]:
        return [standby.pid for standby in self._standbys.values() if standby.pid]

    def prepare(self, order: StandbyOrder, env: Mapping[str, str]) -> None:
        """Prepare the missing standbys. `env` contains the variables that all workers of this node share."""
        self._changes = order.changes
        for local_rank, own in enumerate(order.envs[:MAX_STANDBYS]):
            if local_rank not in self._standbys and not self._refused:
                self._start(local_rank, {**env, **own}, order)

    def _start(self, local_rank: int, env: Mapping[str, str], order: StandbyOrder) -> None:
        prepared = self._with_changes(env)
        sock, other = socket.socketpair()
        standby = self._standbys[local_rank] = Standby(local_rank, sock, settings_of(prepared))
        task = {
            "kind": "standby", "name": f"ds:s{local_rank}", "env": prepared, "local_rank": local_rank,
            "gpu": order.gpu, "backend": order.backend,
        }  # fmt: skip
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(standby))
        with other:
            self._fork(f"standby:{local_rank}", task, [other.fileno()])

    def _with_changes(self, env: Mapping[str, str]) -> dict[str, str]:
        changed = {name: self._changes.get(name, value) for name, value in {**env, **self._changes}.items()}
        return {name: value for name, value in changed.items() if value is not None}

    def forked(self, local_rank: int, pid: int) -> None:
        if local_rank in self._standbys:
            self._standbys[local_rank].pid = pid

    def _read(self, standby: Standby) -> None:
        try:
            data = standby.sock.recv(65536)
            messages = list(standby.reader.feed(data))
        except (OSError, BadFrame):
            data, messages = b"", []
        for message in messages:
            outcome = message.get("standby") or {}
            if outcome.get("why"):
                self.refuse(str(outcome["why"]))
                return
            standby.ready = True
            self._send({"standby": {"mib": outcome.get("mib")}})
        if not data:
            self._close(standby)

    def ended(self, pid: int, code: int) -> None:
        """Drop the standby with this PID, if there is one, and report that it ended unexpectedly."""
        for standby in [each for each in self._standbys.values() if each.pid == pid]:
            self._forget(standby)
            self._note_lost(standby, _describe(code))

    def _note_lost(self, standby: Standby, how: str) -> None:
        text = f"standby worker {standby.local_rank} {how}; the next worker is forked without it"
        self._send({"standby": {"lost": text, "local_rank": standby.local_rank}})

    def start(self, local_rank: int, task: Message) -> int:
        """Let the standby of this local rank run a worker's task. Return its PID; 0 if no standby can be used."""
        standby = self.take(local_rank, task["env"])
        if standby is None:
            return 0
        if hand_over(standby, task):
            return standby.pid
        self._note_lost(standby, "ended")
        return 0

    def take(self, local_rank: int, env: Mapping[str, str]) -> Standby | None:
        """Take the ready standby for a worker with this environment; None if there is none.

        A standby that was started with other settings is ended instead, because CUDA and NCCL read their settings only
        once.
        """
        standby = self._standbys.get(local_rank)
        if standby is None or not (standby.ready and standby.pid):
            return None
        del self._standbys[local_rank]
        self._selector.unregister(standby.sock)
        if standby.settings == settings_of(self._with_changes(env)):
            return standby
        standby.sock.close()
        return None

    def refuse(self, why: str) -> None:
        """End all standbys, prepare no more in this run, and report the reason once."""
        if not self._refused:
            self._refused = True
            self._send({"standby": {"lost": f"no standby workers: {why}"}})
        self.drop()

    def note_end(self, report: Message) -> None:
        """End all standbys, and prepare no more, if a worker ran out of GPU memory, because standbys hold some."""
        if self._standbys and lacked_gpu_memory(str(report.get("traceback", ""))):
            self.refuse("a worker ran out of GPU memory")

    def drop(self) -> None:
        """End all standbys. A standby ends when its connection is closed."""
        for standby in list(self._standbys.values()):
            self._forget(standby)

    def _forget(self, standby: Standby) -> None:
        if self._standbys.get(standby.local_rank) is standby:
            del self._standbys[standby.local_rank]
            self._close(standby)

    def _close(self, standby: Standby) -> None:
        """Close the connection, which ends a running standby. The standby cannot be used any more."""
        standby.ready = False
        if standby.sock.fileno() >= 0:
            self._selector.unregister(standby.sock)
            standby.sock.close()


def hand_over(standby: Standby, task: Message) -> bool:
    """Send a standby the script to run. Return False if the standby has ended."""
    try:
        send(standby.sock, {"go": task})
    except OSError:
        return False
    finally:
        standby.sock.close()
    return True


def _describe(code: int) -> str:
    """Return how a process ended, such as `was killed by SIGKILL`."""
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"ended with code {code}"
