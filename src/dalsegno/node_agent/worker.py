"""The checks in a process of their own, and what the agent does when one of them hangs.

The process does one look at a time, when it is told to. It says which check it begins, and what it found: so that of
one that hangs the name is known. Then the process is killed, the check is unknown, and is left out for a while.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from dalsegno.health.messages import BadReport, Finding, GpuIdentity, NodeReport, parse_report, report_message
from dalsegno.health.result import unknown
from dalsegno.node_agent.findings import clean, clean_gpu
from dalsegno.system.apart import Forked, fork
from dalsegno.wire.frames import BadFrame, Message, Reader, pack

LOOK_S = 1.0  # from one look to the next; each check has a rhythm of its own beside
CHECK_S = 8.0  # how long one check may take; its questions have time-outs of their own, which are shorter
FIRST_LEAVE_S, MOST_LEAVE_S = 60.0, 900.0  # how long one that hung is left out
GPUS = "gpu-list"  # what to call the question which GPUs are here, should it hang
MOST_STUCK = 8  # killed processes that hang in the kernel; then no new ones are started


class Looks(Protocol):
    """What the process does. Made there: it may cost memory."""

    def names(self) -> Iterable[str]:
        """All checks that are asked here."""

    def look(self, without: frozenset[str]) -> Iterator[str | Finding]:
        """Those whose time has come: first its name, then what it found."""

    def gpus(self) -> Iterable[GpuIdentity] | None:
        """The GPUs that are here; None if that is not known."""


Make = Callable[[Message], Looks]  # from the settings that the controller gave


@dataclass(frozen=True)
class HungCheck:
    """A check that hung: left out until then (monotonic), and twice as long the next time."""

    until: float
    length_s: float


class CheckWatch:
    """Has the checks looked at all the time. `found` hears each finding; `heard`, after each look, the names of all
    checks and the GPUs."""

    def __init__(
        self,
        make: Make,
        selector: selectors.BaseSelector,
        found: Callable[[Finding], None],
        heard: Callable[[list[str], list[GpuIdentity] | None], None],
        wall: Callable[[], float],
        check_s: float = CHECK_S,
    ) -> None:
        self._make, self._selector, self._found, self._heard, self._wall = make, selector, found, heard, wall
        self._check_s, self._settings = check_s, dict[str, Any]()
        self._forked: Forked | None = None
        self._reader = Reader()
        self._stuck: list[Forked] = []
        self._now_asked, self._since = "", 0.0  # the check under way
        self._busy = False
        self._leaves: dict[str, HungCheck] = {}
        self._due, self._rests_until = 0.0, 0.0
        self._gone: list[Callable[[], None]] = []  # who waits to hear that a process is

    def set(self, settings: Message) -> bool:
        """Other settings: another process. Whether they are others."""
        if settings == self._settings:
            return False
        self._settings = settings
        self._end()
        self._due = 0.0
        return True

    def rest(self, until: float, gone: Callable[[], None]) -> None:
        """End the process, and start no other before then: whoever resets GPUs must be the only one to hold them.
        `gone` is called when it has let go, or then."""
        self._end()
        self._due, self._rests_until = 0.0, until
        self._gone.append(gone)

    def settings(self) -> Message:
        return self._settings

    def wake(self, now: float) -> float:
        """Look when it is time; returns when to wake again (monotonic)."""
        self._stuck = [forked for forked in self._stuck if not forked.ended()]
        if self._gone:
            if self._stuck and now < self._rests_until:
                return now + 0.01
            waiting, self._gone = self._gone, []
            for gone in waiting:
                gone()
        if self._busy and now - self._since >= self._check_s:
            self._give_up(now)
        due = max(self._due, self._rests_until)
        if not self._busy and now >= due:
            self._begin(now)
        return self._since + self._check_s if self._busy else max(self._due, self._rests_until, now + 0.01)

    def close(self) -> None:
        self._end()
        for forked in self._stuck:
            forked.ended()

    def _begin(self, now: float) -> None:
        self._due = now + LOOK_S
        if self._forked is None:
            if len(self._stuck) >= MOST_STUCK:
                text = f"{MOST_STUCK} processes of checks hang in the kernel: no more are started"
                self._found(Finding("node-agent", unknown(text), self._wall()))
                return
            self._start()
        assert self._forked is not None
        without = [name for name, leave in self._leaves.items() if leave.until > now]
        with contextlib.suppress(OSError):  # it has died: its socket tells
            self._forked.sock.send(pack({"without": without}))
        self._busy, self._since, self._now_asked = True, now, ""

    def _start(self) -> None:
        make, settings = self._make, self._settings
        forked = fork(lambda sock: serve(sock, make(settings)))
        self._forked, self._reader = forked, Reader()
        self._selector.register(forked.sock, selectors.EVENT_READ, lambda events, now: self._listen(forked, now))

    def _listen(self, forked: Forked, now: float) -> None:
        if forked is not self._forked:
            return
        try:
            data = forked.sock.recv(65536)
            for message in self._reader.feed(data):
                self._take(message, now)
        except BlockingIOError:
            return
        except (OSError, BadFrame, BadReport):
            data = b""
        if not data:
            self._give_up(now, "ended")

    def _take(self, message: Message, now: float) -> None:
        self._since = now
        self._leaves.pop(self._now_asked, None)  # it has come past that
        if "begin" in message:
            self._now_asked = str(message["begin"])
        elif "found" in message:
            for finding in parse_report(message["found"]).findings:
                self._found(finding)
        elif "done" in message:
            self._busy, self._now_asked = False, ""
            gpus = None if message["gpus"] is None else list(parse_report(message["gpus"]).gpus)
            self._heard([*message["done"]], gpus)

    def _give_up(self, now: float, what: str = "gave no answer") -> None:
        """The process hangs, or has ended: whose fault it was is known."""
        if name := self._now_asked:
            before = self._leaves.get(name)
            length = min(2 * before.length_s, MOST_LEAVE_S) if before else FIRST_LEAVE_S
            self._leaves[name] = HungCheck(now + length, length)
            text = f"the check {what} after {now - self._since:.0f} s; it is tried again in {length:.0f} s"
            self._found(Finding(name, unknown(text), self._wall()))
        self._end()
        self._due = now + (0.0 if name else LOOK_S)  # one that dies of itself must not keep the machine busy

    def _end(self) -> None:
        if self._forked is not None:
            self._selector.unregister(self._forked.sock)
            self._forked.kill()
            self._stuck.append(self._forked)  # until it is reaped
        self._forked, self._busy, self._now_asked = None, False, ""


# In the process of its own


def serve(sock: socket.socket, looks: Looks) -> None:
    """Look when told to, until the other side is gone."""
    sock.setblocking(True)
    reader = Reader()
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(65536):
            for order in reader.feed(data):
                _look(sock, looks, frozenset(order["without"]))


def _look(sock: socket.socket, looks: Looks, without: frozenset[str]) -> None:
    for each in looks.look(without):
        sock.sendall(pack(_message(each)))
    gpus = None
    if GPUS not in without:
        sock.sendall(pack({"begin": GPUS}))
        gpus = looks.gpus()
    known = None if gpus is None else report_message(NodeReport("", "", (), tuple(map(clean_gpu, gpus))))
    sock.sendall(pack({"done": list(looks.names()), "gpus": known}))


def _message(each: str | Finding) -> Message:
    return {"begin": each} if isinstance(each, str) else {"found": report_message(NodeReport("", "", (clean(each),)))}
