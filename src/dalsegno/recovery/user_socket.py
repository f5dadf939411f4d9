"""The controller's socket, open to every user of the machine. The kernel identifies the caller.

One request of a user is answered in one turn of the controller's loop. The time of answers is charged to the user:
beyond their share, their next requests wait, and requests of others do not.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import selectors
import socket
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.recovery.book import Book, NodeBook
from dalsegno.recovery.budget import count_taken_last_hour
from dalsegno.recovery.client import MOST_ANSWER
from dalsegno.recovery.complaints import Complaints
from dalsegno.recovery.phase import NodePhase
from dalsegno.recovery.policy import Policy
from dalsegno.recovery.reason import write_reason
from dalsegno.recovery.repair import forecast
from dalsegno.recovery.store import Journal
from dalsegno.system.network import listen_at
from dalsegno.wire.bounds import Allowances, WaitingConnections
from dalsegno.wire.frames import BadFrame, Message, Reader, encode, frame, pack, parse
from dalsegno.wire.peer import uid_of

MOST_CALLERS = 128
MOST_PER_USER = 48
CALL_S = 10.0  # a caller that has not finished by then is disconnected
MOST_BYTES = 1 << 16  # per caller: our requests are far shorter
ACCEPT_AT_ONCE = 32
BURST_S, SHARE = 1.0, 0.1  # share of the loop's time for the requests of one user
TURN_S = 0.05  # for the answers of one turn
LEAST_S = 0.001  # minimum charge for a request

Answer = Callable[[int, Message], Message]  # uid, request -> answer


@dataclass(eq=False)
class Caller:
    sock: socket.socket
    uid: int
    until: float  # monotonic
    reader: Reader = field(default_factory=lambda: Reader(MOST_BYTES))
    received: int = 0
    request: bytes | None = None  # waiting for its answer
    broken: str = ""  # why its input cannot be parsed any further; the last answer says so
    finished: bool = False
    unsent: bytearray = field(default_factory=bytearray)

    @property
    def owner(self) -> int:
        return self.uid

    @property
    def waits(self) -> bool:
        """Return whether it waits for an answer and has read the previous one."""
        return not self.unsent and not self.finished and (self.request is not None or bool(self.broken))


class UserSocket:
    """Accepts callers and answers them with `answer`. `turn` is called in every turn of the loop."""

    def __init__(
        self, path: Path, selector: selectors.BaseSelector, answer: Answer, say: Callable[[str], None]
    ) -> None:
        self.selector, self.answer, self.complaints = selector, answer, Complaints(say)
        self.callers: WaitingConnections[Caller] = WaitingConnections(MOST_CALLERS, MOST_PER_USER)
        self._allowances = Allowances(BURST_S, SHARE)
        self._served_at: dict[int, float] = {}  # by uid, of users who wait
        self.listener = listen_at(path, 0o666)  # every user may connect: the kernel tells who it is
        self.listener.setblocking(False)
        selector.register(self.listener, selectors.EVENT_READ, lambda events: self._accept())

    def close(self) -> None:
        for caller in self.callers.all():
            self._drop(caller)
        self.selector.unregister(self.listener)
        self.listener.close()

    def turn(self) -> float | None:
        """Answer one request of each user, disconnect overdue callers, and return when to call again."""
        now = time.monotonic()
        for caller in self.callers.overdue(now):
            self._drop(caller)
        waiting = [caller for caller in self.callers.all() if caller.waits]
        self._served_at = {caller.uid: self._served_at.get(caller.uid, 0.0) for caller in waiting}
        for caller in sorted(waiting, key=lambda caller: self._served_at[caller.uid]):
            if time.monotonic() - now > TURN_S:
                break
            if self._served_at[caller.uid] < now and not self._wait_s(caller.uid):
                self._served_at[caller.uid] = time.monotonic()
                self._serve(caller)
        again = [time.monotonic() + self._wait_s(caller.uid) for caller in self.callers.all() if caller.waits]
        return min((at for at in (self.callers.next_deadline(), *again) if at is not None), default=None)

    def _wait_s(self, uid: int) -> float:
        """Return how long a user has to wait; administrators never do, as they may have to stop the others."""
        return 0.0 if uid in (0, os.geteuid()) else self._allowances.of(uid).ready_in_s()

    def _accept(self) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return  # no more callers, or the caller has gone
            sock.setblocking(False)
            caller = Caller(sock, uid_of(sock), time.monotonic() + CALL_S)
            excess = self.callers.add(caller)
            self._watch(caller)
            if excess is not None:
                self._drop(excess)

    def _watch(self, caller: Caller) -> None:
        """Read from the caller unless one of its requests is unanswered, and write if there is something to send."""
        reading = 0 if caller.request is not None or caller.broken or caller.finished else selectors.EVENT_READ
        events = reading | (selectors.EVENT_WRITE if caller.unsent else 0)
        known = caller.sock in self.selector.get_map()
        if not events:
            if known:
                self.selector.unregister(caller.sock)
        elif known:
            self.selector.modify(caller.sock, events, lambda events: self._exchange(caller, events))
        else:
            self.selector.register(caller.sock, events, lambda events: self._exchange(caller, events))

    def _exchange(self, caller: Caller, events: int) -> None:
        if caller not in self.callers:
            return  # dropped in this very turn, in favour of another
        try:
            if events & selectors.EVENT_READ and not self._read(caller):
                self._drop(caller)
                return
            self._write(caller)
        except OSError:
            self._drop(caller)

    def _read(self, caller: Caller) -> bool:
        """Read from the caller; return False if it has gone or has sent too much."""
        data = caller.sock.recv(MOST_BYTES)
        caller.received += len(data)
        if not data or caller.received > MOST_BYTES:
            return False
        caller.reader.add(data)
        self._next_request(caller)
        return True

    def _next_request(self, caller: Caller) -> None:
        try:
            caller.request = caller.reader.take()
        except BadFrame as error:
            caller.broken = str(error)

    def _serve(self, caller: Caller) -> None:
        began = time.monotonic()
        caller.unsent += self._make_answer(caller)
        caller.request = None
        if not caller.finished:
            self._next_request(caller)
        self._allowances.of(caller.uid).spend(max(time.monotonic() - began, LEAST_S))
        try:
            self._write(caller)
        except OSError:
            self._drop(caller)

    def _make_answer(self, caller: Caller) -> bytes:
        try:
            if caller.request is None:
                raise BadFrame(caller.broken)
            message = parse(caller.request)
        except BadFrame as error:
            caller.finished = True
            return pack({"error": f"not a message: {error}", "hint": "is it the same version on both sides?"})
        try:
            return frame(encode(self.answer(caller.uid, message)), MOST_ANSWER)
        except Exception:  # no input of one user may stop the controller for the others
            self.complaints.about(f"request of uid {caller.uid} failed", traceback.format_exc())
            return pack({"error": "the controller failed to answer", "hint": "see its log"})

    def _write(self, caller: Caller) -> None:
        if caller.unsent:
            with contextlib.suppress(BlockingIOError):
                del caller.unsent[: caller.sock.send(caller.unsent)]
        if caller.finished and not caller.unsent:
            self._drop(caller)
        else:
            self._watch(caller)

    def _drop(self, caller: Caller) -> None:
        self.callers.remove(caller)
        with contextlib.suppress(KeyError):
            self.selector.unregister(caller.sock)
        caller.sock.close()


# Requests about nodes and automation


MOST_EVENTS = 500  # in one answer: they must fit into one message
LAST = 50  # events shown with a node
_HINT = "use `events`, `automation`, `nodes` or `forgive`"


class Answers:
    """Requests `{"events": SINCE}`, `{"automation": WORD}`, `{"nodes": true}`, `{"node": NAME}` and
    `{"forgive": NODE-OR-GPU}`.

    `changed` is called after a user has changed something; `partitions` returns a node's partitions. The journal is
    opened by the thread that first needs it.
    """

    WORDS = ("events", "automation", "nodes", "node", "forgive")

    def __init__(
        self,
        journal: Path,
        changed: Callable[[], None],
        policy: Callable[[], Policy] = Policy,
        partitions: Callable[[str], Collection[str]] = lambda node: (),
    ) -> None:
        self._journal, self._changed, self._policy, self._opened = journal, changed, policy, list[Journal]()
        self._partitions = partitions

    @property
    def store(self) -> Journal:
        if not self._opened:
            self._opened.append(Journal(self._journal))
        return self._opened[0]

    def close(self) -> None:
        for store in self._opened:
            store.close()

    def answer(self, uid: int, request: Message) -> Message:
        if set(request) == {"events"}:
            return self._events(request["events"])
        if set(request) == {"automation"}:
            return self._automation(uid, request["automation"])
        if set(request) == {"nodes"} and request["nodes"] is True:
            return {"nodes": [node_message(own) for own in self.store.look().nodes.values()], **self._slurm_users()}
        if set(request) == {"node"} and isinstance(request["node"], str):
            return self._node(request["node"])
        if set(request) == {"forgive"} and isinstance(request["forgive"], str):
            return self._forgive(uid, request["forgive"])
        raise DalsegnoError("unknown request", hint=_HINT)

    def _events(self, since: object) -> Message:
        """Return the events after this id; a negative number asks for that many of the last ones."""
        if type(since) is not int or abs(since) > 1 << 53:
            raise DalsegnoError("`events` must be the id of the last known event", hint="use 0 for all events")
        first = since if since >= 0 else max(self.store.last_event() + since, 0)
        return {"events": [event.message() for event in self.store.events(first, most=MOST_EVENTS)]}

    def _automation(self, uid: int, word: object) -> Message:
        if word in ("pause", "resume"):
            _check_owner(uid, f"{word} automatic recovery")
            self.store.pause(word == "pause", _name(uid), time.time())
            self._changed()
        elif word != "status":
            raise DalsegnoError(f"unknown automation command `{word!s:.40}`", hint="use pause, resume or status")
        book, policy, now = self.store.look(), self._policy(), time.time()
        out = [node_message(own) for own in book.nodes.values() if own.out]
        suspected = [node_message(own) for own in book.nodes.values() if own.phase is NodePhase.SUSPECTED]
        return {
            "automation": "paused" if book.paused else "on",
            "mode": policy.mode,
            "per_hour": policy.per_hour,
            "taken": {name: count_taken_last_hour(book, name, now) for name in partitions_of(book)},
            "out": out,
            "suspected": suspected,
        }

    def _forgive(self, uid: int, name: str) -> Message:
        _check_owner(uid, "forgive a GPU")
        found = self.store.forgive(name, _name(uid), time.time()) if name else []
        if not found:
            hint = "`dalsegno nodes show NODE` lists a node's GPUs, and which of them were replaced"
            raise DalsegnoError(f"{name!r:.80} is neither a replaced GPU nor a node with one", hint=hint)
        self._changed()
        return {"forgiven": [asdict(each) for each in found]}

    def _node(self, name: str) -> Message:
        book = self.store.look()
        own = book.nodes.get(name)
        if own is None:
            raise DalsegnoError(f"unknown node {name!r:.80}", hint="`dalsegno nodes` lists them")
        ahead = forecast(own, self._partitions(name), book, self._policy(), time.time())
        return {
            **self._slurm_users(),
            "node": node_message(own),
            "ahead": ahead.message() if ahead else None,
            "gpus": [asdict(each) for each in self.store.passports(name)],
            "events": [event.message() for event in self.store.last_events(name, LAST)],
            "checks": [asdict(event) for event in self.store.last_checks(name, LAST)],
        }

    def _slurm_users(self) -> Message:
        return {"slurm_users": sorted(self._policy().slurm_users)}


def _check_owner(uid: int, action: str) -> None:
    if uid not in (0, os.geteuid()):
        raise DalsegnoError(f"only root and the cluster's owner may {action}, not uid {uid}", hint="use sudo")


def node_message(own: NodeBook) -> Message:
    return {
        "node": own.node,
        "phase": own.phase.value,
        "since": own.entered or None,
        "reason": write_reason(own.fault) if own.fault else "",
        "tried": [step.value for step in own.steps],
        "note": own.said,
        "about": own.about.topic.value,
        "held_back": own.held_back.value,
        "excused": list(own.excuses),
        "validated_at": own.validated_at or None,
        "boot": own.last_boot,
    }


def partitions_of(book: Book) -> list[str]:
    """Return the partitions of which a node was ever taken out of service."""
    return sorted({partition for mark in book.marks for partition in mark.partitions})


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
