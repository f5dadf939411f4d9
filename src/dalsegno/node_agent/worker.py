"""Run the checks in a separate process, and handle checks that hang.

The process runs one round of checks at a time, on request. It announces each check before it starts. If the check
hangs, the process is killed, the check's result is unknown, and the check is skipped for a while.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from dalsegno.health.messages import (
    BadReport,
    Finding,
    GpuIdentity,
    GpuReading,
    NodeReport,
    parse_readings,
    parse_report,
    readings_rows,
    report_message,
)
from dalsegno.health.result import unknown
from dalsegno.node_agent.findings import clean, clean_gpu
from dalsegno.system.hanging_calls import Forked, fork
from dalsegno.wire.frames import BadFrame, Message, Reader, pack

ROUND_S = 1.0  # pause between two rounds; each check also has its own interval
CHECK_S = 8.0  # time limit for one check; the timeouts inside a check are shorter
FIRST_LEAVE_S, MAX_LEAVE_S = 60.0, 900.0  # how long a check is skipped after it hung: the first time, and at most
GPUS = "gpu-list"  # the name under which the query for GPUs is reported if it hangs
CLOSE_S = 1.0  # longest wait for a killed process, which may hang in the kernel
MAX_STUCK = 8  # if this many killed processes hang in the kernel, no new ones are started


class CheckRounds(Protocol):
    """The checks that the child process runs. The child creates them itself, because they may use much memory."""

    def names(self) -> Iterable[str]:
        """Return the names of all checks that run on this node."""

    def run_due(self, without: frozenset[str]) -> Iterator[str | Finding]:
        """Run the due checks: yield a check's name, then its finding."""

    def gpus(self) -> Iterable[GpuIdentity] | None:
        """Return the GPUs of the node; None if unknown."""

    def readings(self) -> Iterable[GpuReading] | None:
        """Return the GPU readings to show to users; None if they have not changed, or if no query is due."""


Make = Callable[[Message], CheckRounds]  # creates the checks from the controller's settings


@dataclass(frozen=True)
class HungCheck:
    """A check that hung. It is skipped until `until` (monotonic), for `length_s` in total.

    If it hangs again at its next attempt, it is skipped for twice as long, up to a limit.
    """

    until: float
    length_s: float


class CheckWatch:
    """Runs the checks continuously. Calls `found` with each finding. After each round, calls `on_round` with the names
    of all checks and the GPUs."""

    def __init__(
        self,
        make: Make,
        selector: selectors.BaseSelector,
        found: Callable[[Finding], None],
        on_round: Callable[[list[str], list[GpuIdentity] | None], None],
        wall: Callable[[], float],
        check_s: float = CHECK_S,
        on_readings: Callable[[tuple[GpuReading, ...]], None] = lambda readings: None,
    ) -> None:
        self._on_readings = on_readings
        self._make, self._selector, self._found, self._on_round, self._wall = make, selector, found, on_round, wall
        self._check_s, self._settings = check_s, dict[str, Any]()
        self._forked: Forked | None = None
        self._reader = Reader()
        self._stuck: list[Forked] = []
        self._now_asked, self._since = "", 0.0  # the current check; time of the last message (monotonic)
        self._busy = False
        self._leaves: dict[str, HungCheck] = {}
        self._due, self._rests_until = 0.0, 0.0
        self._gone: list[Callable[[], None]] = []  # functions to call when the process has ended

    def set(self, settings: Message) -> bool:
        """Apply new settings by restarting the process. Return False, without a restart, if they have not changed."""
        if settings == self._settings:
            return False
        self._settings = settings
        self._end()
        self._due = 0.0
        return True

    def rest(self, until: float, gone: Callable[[], None]) -> None:
        """Stop the process until `until` (monotonic), so that the GPUs are not in use and can be reset.

        `gone` is called when the process has ended, at the latest at `until`.
        """
        self._end()
        self._due, self._rests_until = 0.0, until
        self._gone.append(gone)

    def settings(self) -> Message:
        return self._settings

    def wake(self, now: float) -> float:
        """Start a round when it is due and return when to call again (monotonic)."""
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
        """End the process and wait for it briefly, so that it cannot write metrics after their file is removed."""
        self._end()
        for forked in self._stuck:
            forked.wait(CLOSE_S)

    def _begin(self, now: float) -> None:
        self._due = now + ROUND_S
        if self._forked is None:
            if len(self._stuck) >= MAX_STUCK:
                text = f"{MAX_STUCK} check processes hang in the kernel: no more are started"
                self._found(Finding("node-agent", unknown(text), self._wall()))
                return
            self._start()
        assert self._forked is not None
        without = [name for name, leave in self._leaves.items() if leave.until > now]
        with contextlib.suppress(OSError):  # if the process has died, its socket reports that
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
        self._leaves.pop(self._now_asked, None)  # a message shows that the current check did not hang
        if "begin" in message:
            self._now_asked = str(message["begin"])
        elif "found" in message:
            for finding in parse_report(message["found"]).findings:
                self._found(finding)
        elif "done" in message:
            self._busy, self._now_asked = False, ""
            gpus = None if message["gpus"] is None else list(parse_report(message["gpus"]).gpus)
            self._on_round([*message["done"]], gpus)
            if message["readings"] is not None:
                self._on_readings(parse_readings(message["readings"]))

    def _give_up(self, now: float, what: str = "gave no answer") -> None:
        """Handle a process that hangs or has ended: report the current check as unknown and skip it for a while."""
        if name := self._now_asked:
            before = self._leaves.get(name)
            length = min(2 * before.length_s, MAX_LEAVE_S) if before else FIRST_LEAVE_S
            self._leaves[name] = HungCheck(now + length, length)
            text = f"the check {what} after {now - self._since:.0f} s; next attempt in {length:.0f} s"
            self._found(Finding(name, unknown(text), self._wall()))
        self._end()
        # If the process died before its first check, a new process may also die at once, so wait before starting it.
        self._due = now + (0.0 if name else ROUND_S)

    def _end(self) -> None:
        if self._forked is not None:
            self._selector.unregister(self._forked.sock)
            self._forked.kill()
            self._stuck.append(self._forked)  # the process counts as stuck until it has ended
        self._forked, self._busy, self._now_asked = None, False, ""


# Code that runs in the separate process


def serve(sock: socket.socket, rounds: CheckRounds) -> None:
    """Run one round whenever the other side asks for it, until the other side disconnects."""
    sock.setblocking(True)
    reader = Reader()
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(65536):
            for order in reader.feed(data):
                _run_round(sock, rounds, frozenset(order["without"]))


def _run_round(sock: socket.socket, rounds: CheckRounds, without: frozenset[str]) -> None:
    for each in rounds.run_due(without):
        sock.sendall(pack(_message(each)))
    gpus = readings = None
    if GPUS not in without:
        sock.sendall(pack({"begin": GPUS}))
        gpus, readings = rounds.gpus(), rounds.readings()
    known = None if gpus is None else report_message(NodeReport("", "", (), tuple(map(clean_gpu, gpus))))
    rows = None if readings is None else readings_rows(readings)
    sock.sendall(pack({"done": list(rounds.names()), "gpus": known, "readings": rows}))


def _message(each: str | Finding) -> Message:
    return {"begin": each} if isinstance(each, str) else {"found": report_message(NodeReport("", "", (clean(each),)))}
