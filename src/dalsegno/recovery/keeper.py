"""Keeping coordinators: each run that was asked for has one, until it says that the run is over.

They live in sessions of their own and outlast the controller; the next one takes them over from the records.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.recovery.person import check_room, look_up
from dalsegno.recovery.records import Record, Records
from dalsegno.recovery.restarts import Do, Step, after_end, at_start, when_asked
from dalsegno.runs.coordinator.program import SHORT_LIFE_S
from dalsegno.system.children import Child, Process, arguments, find, owner, start

Say = Callable[[str], None]
PROGRAM = "run-coordinator"
MOST_GIVEN_UP = 64  # of one user that are remembered


@dataclass
class Watched:
    """A living coordinator. `fd` becomes readable at its end; one that was taken over has no `child`."""

    fd: int
    since: float  # monotonic
    child: Child | None = None


class Keeper:
    """`launcher` are the words before a program's name; `env` is the controller's own environment."""

    def __init__(
        self,
        records: Records,
        launcher: Sequence[str],
        env: Mapping[str, str],
        selector: selectors.BaseSelector,
        say: Say,
    ) -> None:
        self.records, self.launcher, self.env, self.selector, self.say = records, launcher, env, selector, say
        self.known: dict[str, Record] = {}
        self.watched: dict[str, Watched] = {}
        self.due: dict[str, float] = {}  # run -> when to start its coordinator (monotonic)

    def begin(self) -> None:
        """Take over what an earlier controller has left: watch what lives, start what is gone."""
        records, wrong = self.records.read()
        for line in wrong:
            self.say(line)
        orphans = self._orphans() if any(not record.lives() for record in records.values()) else {}
        for record in records.values():
            orphan = orphans.get((self._argv(record), record.uid))
            if orphan and not record.lives():  # the controller died between starting it and writing that down
                record = replace(record, pid=orphan.pid, start=orphan.start)
            self._do(at_start(record, record.lives()))

    def ask(self, folder: str, uid: int) -> None:
        """Have a run kept; one that is kept already stays as it is."""
        wanted = Record(folder, uid)
        step = when_asked(wanted, self.known.get(wanted.run))
        if step is None:
            raise DalsegnoError(f"another run with the id `{wanted.run}` is kept here", hint="choose another id")
        if step.do is not Do.START:
            return
        check_room(uid, [self.known[run].uid for run in (*self.watched, *self.due)])
        try:
            self._start(step.record)
        except DalsegnoError:
            self._do(Step(Do.FORGET, step.record))
            raise

    def kept(self, uid: int) -> list[Record]:
        """The runs of one user; root sees all."""
        return [record for record in self.known.values() if uid in (0, record.uid)]

    def wake(self) -> float | None:
        """Start those whose pause is over; returns when the next one is due (monotonic)."""
        for run in [run for run, at in self.due.items() if at <= time.monotonic()]:
            del self.due[run]
            self._start_again(self.known[run])
        return min(self.due.values(), default=None)

    def _do(self, step: Step) -> None:
        run = step.record.run
        self.known[run] = step.record
        if step.do is Do.START:
            self.due[run] = time.monotonic() + step.after_s
        elif step.do is Do.WATCH:
            self._take_over(step.record)
        elif step.do is Do.GIVE_UP:
            self.say(f"{run}: its coordinator has ended {step.record.short_lives} times in a row; given up")
            self._save(step.record)
            given_up = [each for each in self.known.values() if each.given_up and each.uid == step.record.uid]
            for old in given_up[:-MOST_GIVEN_UP]:
                self._forget(old)
        elif step.do is Do.FORGET:
            self._forget(step.record)

    def _forget(self, record: Record) -> None:
        del self.known[record.run]
        self.records.remove(record)

    def _start(self, record: Record) -> None:
        """Written down before, so that a death in between is found out, and after, with the PID."""
        self.records.write(record)
        identity, env = look_up(record.uid, self.env)
        # It writes to its run's folder. Another user's process must not hold our log: it could write or empty it.
        child = start(self._argv(record), env, identity=identity, output=Path(os.devnull) if identity else None)
        record = replace(record, pid=child.process.pid, start=child.process.start)
        self.known[record.run] = record
        self._save(record)
        self.say(f"{record.run}: coordinator {record.pid} of uid {record.uid} started")
        self._watch(record.run, Watched(child.fd, time.monotonic(), child))

    def _start_again(self, record: Record) -> None:
        try:
            self._start(record)
        except DalsegnoError as error:
            self.say(f"{record.run}: {error}")
            self._do(after_end(record, None, 0.0))

    def _take_over(self, record: Record) -> None:
        try:
            fd = os.pidfd_open(record.pid)
        except OSError:
            self._do(after_end(record, None, SHORT_LIFE_S))
            return
        if not record.lives():  # looked at again with the handle in hand: the PID may be another's by now
            os.close(fd)
            self._do(after_end(record, None, SHORT_LIFE_S))
            return
        self.say(f"{record.run}: coordinator {record.pid} taken over")
        self._watch(record.run, Watched(fd, time.monotonic()))

    def _watch(self, run: str, watched: Watched) -> None:
        self.watched[run] = watched
        self.selector.register(watched.fd, selectors.EVENT_READ, lambda events: self._ended(run))

    def _ended(self, run: str) -> None:
        watched = self.watched.pop(run)
        self.selector.unregister(watched.fd)
        os.close(watched.fd)
        code = watched.child.poll() if watched.child else None
        # How long one that was taken over has lived is not known; long enough to see a controller die.
        lived_s = time.monotonic() - watched.since if watched.child else SHORT_LIFE_S
        step = after_end(self.known[run], code, lived_s)
        self.say(f"{run}: coordinator ended with code {'unknown' if code is None else code}; {step.do.value}")
        self._do(step)

    def _save(self, record: Record) -> None:
        """A full disk must not keep a coordinator from living: it is found again by its command line."""
        try:
            self.records.write(record)
        except DalsegnoError as error:
            self.say(f"{record.run}: {error}")

    def _argv(self, record: Record) -> tuple[str, ...]:
        return (*self.launcher, PROGRAM, record.folder)

    def _orphans(self) -> dict[tuple[tuple[str, ...], int], Process]:
        """Coordinators by command line and owner."""
        found = find(lambda pid: PROGRAM in arguments(pid))
        return {(tuple(arguments(one.pid)), uid): one for one in found if (uid := owner(one.pid)) is not None}
