"""Keeping coordinators: each run that was asked for has one, until it says that the run is over.

They live in sessions of their own and outlast the controller; the next one takes them over from the records.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import selectors
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.runs.coordinator.program import MOST_SHORT_LIVES, SHORT_LIFE_S
from dalsegno.runs.folder import RunFolder
from dalsegno.system.children import Child, Identity, Process, arguments, find, owner, start
from dalsegno.system.files import make_folder, read_json, write_atomic

# ---- What the controller remembers of each run it keeps: a small file each, so that its own death loses none of
# them.


# A run's id is also the name of its file here: nothing that leads elsewhere, nothing hidden.
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class RunRecord:
    """A run that was asked for. `pid` and `start` (ticks) are its coordinator's; 0 while none is known."""

    folder: str
    uid: int
    pid: int = 0
    start: int = 0
    short_lives: int = 0  # of the last ones, in a row
    given_up: bool = False

    @property
    def run(self) -> str:
        return Path(self.folder).name

    @property
    def process(self) -> Process:
        return Process(self.pid, self.start)

    def lives(self) -> bool:
        """Its owner is asked for too: after a reboot of the machine another process could have the same PID and age."""
        return self.process.alive() and owner(self.pid) == self.uid


class Records:
    """The folder of these files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self) -> tuple[dict[str, RunRecord], list[str]]:
        """All of them, and what is wrong with those that cannot be understood."""
        make_folder(self.folder, 0o700)
        found, wrong = {}, []
        for path in sorted(self.folder.glob("*.json")):
            try:
                record = _record(read_json(path))
                found[record.run] = record
            except (DalsegnoError, OSError, TypeError, ValueError) as error:
                wrong.append(f"{path.name} is passed over: {error}")
        return found, wrong

    def write(self, record: RunRecord) -> None:
        write_atomic(self._path(record), json.dumps(asdict(record)), 0o600)

    def remove(self, record: RunRecord) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path(record).unlink()

    def _path(self, record: RunRecord) -> Path:
        return self.folder / f"{record.run}.json"


def _record(value: object) -> RunRecord:
    """Strict about what is there, easy about what is not: a later version may have added to it."""
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    known = {field.name: field.type for field in fields(RunRecord)}
    record = RunRecord(**{name: value[name] for name in known if name in value})
    kinds = {"str": str, "int": int, "bool": bool}
    for name, kind in known.items():
        if type(getattr(record, name)) is not kinds[str(kind)]:
            raise ValueError(f"`{name}` is no {kind}")
    return record


# ---- What to do about a coordinator that is not running (any more). Pure.


OVER = 0  # by this code alone a coordinator says that its run is over: Python's own failures end with 1
PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # after the first short life, the second …


class Do(Enum):
    FORGET = "forget"  # the run is over
    START = "start"
    GIVE_UP = "give up"
    WATCH = "watch"  # it lives
    LEAVE = "leave"


@dataclass(frozen=True)
class RestartStep:
    """What to do, when, and the record as it is from now on."""

    do: Do
    record: RunRecord
    after_s: float = 0.0


def after_end(record: RunRecord, code: int | None, lived_s: float) -> RestartStep:
    """A coordinator has ended. `code` is None where no one can tell: one that an earlier controller had started.

    Such a one is started again: a coordinator whose run is over sees that and says so.
    """
    gone = replace(record, pid=0, start=0)
    if code == OVER:
        return RestartStep(Do.FORGET, gone)
    if lived_s >= SHORT_LIFE_S:
        return RestartStep(Do.START, replace(gone, short_lives=0))
    gone = replace(gone, short_lives=record.short_lives + 1)
    if gone.short_lives >= MOST_SHORT_LIVES:
        return RestartStep(Do.GIVE_UP, replace(gone, given_up=True))
    return RestartStep(Do.START, gone, PAUSES_S[min(gone.short_lives, len(PAUSES_S)) - 1])


def at_start(record: RunRecord, lives: bool) -> RestartStep:
    """The controller has come (back) and finds this record."""
    if lives:
        return RestartStep(Do.WATCH, record)
    if record.given_up:
        return RestartStep(Do.LEAVE, record)
    return RestartStep(Do.START, replace(record, pid=0, start=0))


def when_asked(wanted: RunRecord, known: RunRecord | None) -> RestartStep | None:
    """Someone asks for a run. None: its id is taken by another. One that was given up is tried again."""
    if known is None:
        return RestartStep(Do.START, wanted)
    if known.uid != wanted.uid:
        return None
    if known.given_up:
        return RestartStep(Do.START, wanted)
    return RestartStep(Do.LEAVE, known) if known.folder == wanted.folder else None


# ---- Who asks, and what they may ask for: uid to identity and environment, and the folder that must be theirs.


MOST_RUNS = 500  # each costs a process and an open file; the usual limit of those is 1024
MOST_RUNS_OF_A_USER = 64  # some 30 MB of the head each, and an eighth of the above: no one keeps the others out
PASSED_ON = ("PATH", "SLURM_CONF", "LC_ALL", "DALSEGNO_MARK")


def look_up(uid: int, own: Mapping[str, str]) -> tuple[Identity | None, dict[str, str]]:
    """Whom a coordinator shall be (None: just what we are) and its environment. `own` is the controller's."""
    try:
        person = pwd.getpwuid(uid)
    except KeyError:
        raise DalsegnoError(
            f"the head node knows no user with uid {uid}", hint="`users:` in the cluster file adds one"
        ) from None
    env = {name: own[name] for name in PASSED_ON if name in own}
    env |= {"HOME": person.pw_dir, "USER": person.pw_name, "LOGNAME": person.pw_name}
    if uid == os.geteuid():
        return None, env
    groups = tuple(os.getgrouplist(person.pw_name, person.pw_gid))
    return Identity(uid, person.pw_gid, groups), env


def check_may_ask(uid: int) -> None:
    """A controller without root can be no one but itself."""
    own = os.geteuid()
    if own not in (0, uid):
        raise DalsegnoError(
            f"this cluster runs without root, so only its owner (uid {own}) can have runs kept here",
            hint="make a cluster of your own, or have it made with sudo",
        )


def check_room(uid: int, kept: Sequence[int]) -> None:
    """Whether one run more of this user may be kept; `kept` are the owners of those that are."""
    if len(kept) >= MOST_RUNS:
        raise DalsegnoError(f"the controller keeps {MOST_RUNS} runs already", hint="try again when some have ended")
    if uid != os.geteuid() and kept.count(uid) >= MOST_RUNS_OF_A_USER:
        raise DalsegnoError(
            f"the controller keeps {MOST_RUNS_OF_A_USER} runs of yours already, the most that one user may have",
            hint="`dalsegno runs` lists them: wait until some have ended, or `dalsegno cancel` some",
        )


def check_folder(folder: object, uid: int) -> str:
    """The path of a run's folder that belongs to the caller.

    One answer for all that may be wrong: whoever asks must not learn what is in places they cannot see.
    """
    if not (isinstance(folder, str) and folder == os.path.normpath(folder) and folder.startswith("/")):
        raise DalsegnoError("a run's folder is named by its whole path", hint="such as /home/ada/runs/ID")
    if not RUN_ID.fullmatch(Path(folder).name):
        what = "the last part of a run's folder is its id: letters, digits, `.`, `_` and `-`"
        raise DalsegnoError(what, hint="such as /home/ada/runs/train-k3m9x")
    if not _is_run_of(folder, uid):
        raise DalsegnoError(
            f"{folder!r} is no run's folder of yours on the head node",
            hint="it must belong to you, hold a plan.json, and be seen from the head node",
        )
    return folder


def _is_run_of(folder: str, uid: int) -> bool:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (OSError, ValueError):  # ValueError: letters that no path can hold
        return False
    try:
        plan = os.stat(RunFolder(Path(folder)).plan.name, dir_fd=handle, follow_symlinks=False)
        return os.fstat(handle).st_uid == uid and stat.S_ISREG(plan.st_mode)
    except OSError:
        return False
    finally:
        os.close(handle)


# ---- Keeping coordinators: each run that was asked for has one, until it says that the run is over.


Say = Callable[[str], None]
PROGRAM = "run-coordinator"
MOST_GIVEN_UP = 64  # of one user that are remembered


@dataclass
class WatchedCoordinator:
    """A living coordinator. `fd` becomes readable at its end; one that was taken over has no `child`."""

    fd: int
    since: float  # monotonic
    child: Child | None = None


class CoordinatorKeeper:
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
        self.known: dict[str, RunRecord] = {}
        self.watched: dict[str, WatchedCoordinator] = {}
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
        wanted = RunRecord(folder, uid)
        step = when_asked(wanted, self.known.get(wanted.run))
        if step is None:
            raise DalsegnoError(f"another run with the id `{wanted.run}` is kept here", hint="choose another id")
        if step.do is not Do.START:
            return
        check_room(uid, [self.known[run].uid for run in (*self.watched, *self.due)])
        try:
            self._start(step.record)
        except DalsegnoError:
            self._do(RestartStep(Do.FORGET, step.record))
            raise

    def kept(self, uid: int) -> list[RunRecord]:
        """The runs of one user; root sees all."""
        return [record for record in self.known.values() if uid in (0, record.uid)]

    def wake(self) -> float | None:
        """Start those whose pause is over; returns when the next one is due (monotonic)."""
        for run in [run for run, at in self.due.items() if at <= time.monotonic()]:
            del self.due[run]
            self._start_again(self.known[run])
        return min(self.due.values(), default=None)

    def _do(self, step: RestartStep) -> None:
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

    def _forget(self, record: RunRecord) -> None:
        del self.known[record.run]
        self.records.remove(record)

    def _start(self, record: RunRecord) -> None:
        """Written down before, so that a death in between is found out, and after, with the PID."""
        self.records.write(record)
        identity, env = look_up(record.uid, self.env)
        # It writes to its run's folder. Another user's process must not hold our log: it could write or empty it.
        child = start(self._argv(record), env, identity=identity, output=Path(os.devnull) if identity else None)
        record = replace(record, pid=child.process.pid, start=child.process.start)
        self.known[record.run] = record
        self._save(record)
        self.say(f"{record.run}: coordinator {record.pid} of uid {record.uid} started")
        self._watch(record.run, WatchedCoordinator(child.fd, time.monotonic(), child))

    def _start_again(self, record: RunRecord) -> None:
        try:
            self._start(record)
        except DalsegnoError as error:
            self.say(f"{record.run}: {error}")
            self._do(after_end(record, None, 0.0))

    def _take_over(self, record: RunRecord) -> None:
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
        self._watch(record.run, WatchedCoordinator(fd, time.monotonic()))

    def _watch(self, run: str, watched: WatchedCoordinator) -> None:
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

    def _save(self, record: RunRecord) -> None:
        """A full disk must not keep a coordinator from living: it is found again by its command line."""
        try:
            self.records.write(record)
        except DalsegnoError as error:
            self.say(f"{record.run}: {error}")

    def _argv(self, record: RunRecord) -> tuple[str, ...]:
        return (*self.launcher, PROGRAM, record.folder)

    def _orphans(self) -> dict[tuple[tuple[str, ...], int], Process]:
        """Coordinators by command line and owner."""
        found = find(lambda pid: PROGRAM in arguments(pid))
        return {(tuple(arguments(one.pid)), uid): one for one in found if (uid := owner(one.pid)) is not None}
