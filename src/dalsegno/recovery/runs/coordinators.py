"""Supervision of coordinators: each run has a coordinator until the coordinator reports that the run is over.

Coordinators run in their own sessions and outlive the controller. The next controller finds them in the records.
"""

from __future__ import annotations

import logging
import os
import pwd
import selectors
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.log import LEVEL
from dalsegno.recovery.runs.run_records import RUN_ID, RunRecord, RunRecords
from dalsegno.runs.coordinator.program import MAX_SHORT_LIVES, SHORT_LIFE_S
from dalsegno.runs.coordinator.trust import CONTROLLER
from dalsegno.runs.folder import RunFolder
from dalsegno.system.children import Child, Identity, Process, arguments, find, owner, start

log = logging.getLogger("controller.runs")

# What to do when a coordinator is not running


OVER = 0  # only this exit code means that the run is over: Python's own failures exit with 1
PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # restart delay after the first early end, the second, and so on


class CoordinatorTask(Enum):
    FORGET = "forget"  # the run is over
    START = "start"
    GIVE_UP = "give up"
    WATCH = "watch"  # the coordinator is running
    LEAVE = "leave"


@dataclass(frozen=True)
class RestartStep:
    """What to do next for a coordinator, when that is due, and the record to keep from then on."""

    do: CoordinatorTask
    record: RunRecord
    after_s: float = 0.0


def on_coordinator_end(record: RunRecord, code: int | None, lived_s: float) -> RestartStep:
    """Decide what to do when a coordinator has ended.

    `code` is its exit code; None if an earlier controller had started it. Then the coordinator is restarted: if the run
    is over, the new coordinator reports that.
    """
    gone = replace(record, pid=0, start=0)
    if code == OVER:
        return RestartStep(CoordinatorTask.FORGET, gone)
    if lived_s >= SHORT_LIFE_S:
        return RestartStep(CoordinatorTask.START, replace(gone, short_lives=0))
    gone = replace(gone, short_lives=record.short_lives + 1)
    if gone.short_lives >= MAX_SHORT_LIVES:
        return RestartStep(CoordinatorTask.GIVE_UP, replace(gone, given_up=True))
    return RestartStep(CoordinatorTask.START, gone, PAUSES_S[min(gone.short_lives, len(PAUSES_S)) - 1])


def on_controller_start(record: RunRecord, lives: bool) -> RestartStep:
    """Decide what to do with a record that the controller finds when it starts."""
    if lives:
        return RestartStep(CoordinatorTask.WATCH, record)
    if record.given_up:
        return RestartStep(CoordinatorTask.LEAVE, record)
    return RestartStep(CoordinatorTask.START, replace(record, pid=0, start=0))


def on_request(wanted: RunRecord, known: RunRecord | None) -> RestartStep | None:
    """Decide what to do when a run is requested; None if another run has its id. A run with `given_up` is retried."""
    if known is None:
        return RestartStep(CoordinatorTask.START, wanted)
    if known.uid != wanted.uid:
        return None
    if known.given_up:
        return RestartStep(CoordinatorTask.START, wanted)
    return RestartStep(CoordinatorTask.LEAVE, known) if known.folder == wanted.folder else None


# Users and their run folders


MAX_RUNS = 500  # each run needs a process and an open file; the usual limit is 1024 open files
MAX_RUNS_OF_A_USER = 64  # each run needs about 30 MB on the head node; one user cannot exhaust MAX_RUNS
PASSED_ON = ("PATH", "SLURM_CONF", "LC_ALL", "DALSEGNO_MARK", CONTROLLER, LEVEL)


def find_identity(uid: int, own: Mapping[str, str]) -> tuple[Identity | None, dict[str, str]]:
    """Return the identity of a user's coordinator (None: the controller's own) and its environment."""
    try:
        person = pwd.getpwuid(uid)
    except KeyError:
        raise DalsegnoError(
            f"no user with uid {uid} on the head node", hint="`users:` in the cluster file adds users"
        ) from None
    env = {name: own[name] for name in PASSED_ON if name in own}
    env |= {"HOME": person.pw_dir, "USER": person.pw_name, "LOGNAME": person.pw_name}
    if uid == os.geteuid():
        return None, env
    groups = tuple(os.getgrouplist(person.pw_name, person.pw_gid))
    return Identity(uid, person.pw_gid, groups), env


def check_may_ask(uid: int) -> None:
    """Raise an error if the controller runs without root and the caller is not its owner."""
    own = os.geteuid()
    if own not in (0, uid):
        raise DalsegnoError(
            f"this cluster runs without root, so only its owner (uid {own}) can start runs",
            hint="create your own cluster, or create this one with sudo",
        )


def check_run_limit(uid: int, kept: Sequence[int]) -> None:
    """Raise an error if the limits do not allow this user another run. `kept` are the owners of the current runs."""
    if len(kept) >= MAX_RUNS:
        raise DalsegnoError(f"the controller has {MAX_RUNS} runs, its limit", hint="try again when some have ended")
    if uid != os.geteuid() and kept.count(uid) >= MAX_RUNS_OF_A_USER:
        raise DalsegnoError(
            f"you have {MAX_RUNS_OF_A_USER} runs, the limit for one user",
            hint="`dalsegno runs` lists them; wait until some have ended, or cancel some with `dalsegno cancel`",
        )


def check_folder(folder: object, uid: int) -> str:
    """Return the path of a run folder if it belongs to the caller.

    The error does not say what is wrong with the folder: the caller must not learn what exists in folders that the
    caller cannot read.
    """
    if not (isinstance(folder, str) and folder == os.path.normpath(folder) and folder.startswith("/")):
        raise DalsegnoError("the run folder must be an absolute path", hint="such as /home/ada/runs/ID")
    if not RUN_ID.fullmatch(Path(folder).name):
        what = "the name of the run folder is the run's id: letters, digits, `.`, `_` and `-`"
        raise DalsegnoError(what, hint="such as /home/ada/runs/train-k3m9x")
    if not _is_run_of(folder, uid):
        raise DalsegnoError(
            f"{folder!r} is not a run folder of yours on the head node",
            hint="it must belong to you, contain a plan.json and be visible on the head node",
        )
    return folder


def _is_run_of(folder: str, uid: int) -> bool:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (OSError, ValueError):  # ValueError: characters that are not allowed in a path
        return False
    try:
        plan = os.stat(RunFolder(Path(folder)).plan.name, dir_fd=handle, follow_symlinks=False)
        return os.fstat(handle).st_uid == uid and stat.S_ISREG(plan.st_mode)
    except OSError:
        return False
    finally:
        os.close(handle)


# Starting and restarting coordinators


PROGRAM = "run-coordinator"
MAX_GIVEN_UP = 64  # maximum number of records with `given_up` per user


@dataclass
class WatchedCoordinator:
    """A running coordinator. `fd` becomes readable when it ends.

    `child` is None if an earlier controller started it.
    """

    fd: int
    since: float  # when it was started or taken over (monotonic)
    child: Child | None = None


class CoordinatorKeeper:
    """Starts coordinators and restarts them.

    `launcher` is the command that starts Dal Segno's programs; `env` is the controller's own environment.
    """

    def __init__(
        self,
        records: RunRecords,
        launcher: Sequence[str],
        env: Mapping[str, str],
        selector: selectors.BaseSelector,
    ) -> None:
        self.records, self.launcher, self.env, self.selector = records, launcher, env, selector
        self.known: dict[str, RunRecord] = {}
        self.watched: dict[str, WatchedCoordinator] = {}
        self.due: dict[str, float] = {}  # run -> when to start its coordinator (monotonic)

    def begin(self) -> None:
        """Take over the runs of an earlier controller: watch coordinators that run, and start the others.

        Coordinators that were given up are not started.
        """
        records, wrong = self.records.read()
        for line in wrong:
            log.warning(line)
        orphans = self._orphans() if any(not record.lives() for record in records.values()) else {}
        for record in records.values():
            orphan = orphans.get((self._argv(record), record.uid))
            # The earlier controller died after it had started this coordinator and before it had recorded it.
            if orphan and not record.lives():
                record = replace(record, pid=orphan.pid, start=orphan.start)
            self._do(on_controller_start(record, record.lives()))

    def request(self, folder: str, uid: int) -> None:
        """Start a run's coordinator, unless the run has one."""
        wanted = RunRecord(folder, uid)
        step = on_request(wanted, self.known.get(wanted.run))
        ended = self.records.read_ended(wanted.run)
        if step is None or (ended is not None and ended.uid != uid):  # only the owner of an ended run may reuse its id
            raise DalsegnoError(f"the run id `{wanted.run}` is in use", hint="choose another id")
        if step.do is not CoordinatorTask.START:
            return
        check_run_limit(uid, [self.known[run].uid for run in (*self.watched, *self.due)])
        try:
            self._start(step.record)
        except DalsegnoError:
            self._do(RestartStep(CoordinatorTask.FORGET, step.record))
            raise

    def runs_of(self, uid: int) -> list[RunRecord]:
        """Return the runs of one user, or all runs for root."""
        return [record for record in self.known.values() if uid in (0, record.uid)]

    def wake(self) -> float | None:
        """Start the coordinators whose delay is over and return when the next one is due (monotonic)."""
        for run in [run for run, at in self.due.items() if at <= time.monotonic()]:
            del self.due[run]
            self._restart(self.known[run])
        return min(self.due.values(), default=None)

    def _do(self, step: RestartStep) -> None:
        run = step.record.run
        self.known[run] = step.record
        if step.do is CoordinatorTask.START:
            self.due[run] = time.monotonic() + step.after_s
        elif step.do is CoordinatorTask.WATCH:
            self._take_over(step.record)
        elif step.do is CoordinatorTask.GIVE_UP:
            times = step.record.short_lives
            log.error("%s: coordinator ended early %d times in a row; not restarted again", run, times)
            self._save(step.record)
            given_up = [each for each in self.known.values() if each.given_up and each.uid == step.record.uid]
            for old in given_up[:-MAX_GIVEN_UP]:
                self._forget(old)
        elif step.do is CoordinatorTask.FORGET:
            self._forget(step.record)

    def _forget(self, record: RunRecord) -> None:
        del self.known[record.run]
        self.records.remove(record)

    def _start(self, record: RunRecord) -> None:
        """Start a coordinator. Write its record before the start, in case of a crash, and again with the PID."""
        self.records.write(record)
        identity, env = find_identity(record.uid, self.env)
        # The coordinator logs to its run folder. If it had the controller's log open, its user could modify that log.
        child = start(self._argv(record), env, identity=identity, output=Path(os.devnull) if identity else None)
        record = replace(record, pid=child.process.pid, start=child.process.start)
        self.known[record.run] = record
        self._save(record)
        log.info("%s: coordinator %d of uid %d started", record.run, record.pid, record.uid)
        self._watch(record.run, WatchedCoordinator(child.fd, time.monotonic(), child))

    def _restart(self, record: RunRecord) -> None:
        try:
            self._start(record)
        except DalsegnoError as error:
            log.error("%s: %s", record.run, error)
            self._do(on_coordinator_end(record, None, 0.0))

    def _take_over(self, record: RunRecord) -> None:
        try:
            fd = os.pidfd_open(record.pid)
        except OSError:
            self._do(on_coordinator_end(record, None, SHORT_LIFE_S))
            return
        if not record.lives():  # checked again while the handle is open: the PID may belong to another process by now
            os.close(fd)
            self._do(on_coordinator_end(record, None, SHORT_LIFE_S))
            return
        log.info("%s: coordinator %d taken over", record.run, record.pid)
        self._watch(record.run, WatchedCoordinator(fd, time.monotonic()))

    def _watch(self, run: str, watched: WatchedCoordinator) -> None:
        self.watched[run] = watched
        self.selector.register(watched.fd, selectors.EVENT_READ, lambda events: self._ended(run))

    def _ended(self, run: str) -> None:
        watched = self.watched.pop(run)
        self.selector.unregister(watched.fd)
        os.close(watched.fd)
        code = watched.child.poll() if watched.child else None
        # The age of a coordinator that was taken over is unknown, but it has outlived a controller.
        lived_s = time.monotonic() - watched.since if watched.child else SHORT_LIFE_S
        step = on_coordinator_end(self.known[run], code, lived_s)
        log.info("%s: coordinator ended with code %s; %s", run, "unknown" if code is None else code, step.do.value)
        self._do(step)

    def _save(self, record: RunRecord) -> None:
        """Save a record. On a full disk the coordinator runs without one, and is later found by its command line."""
        try:
            self.records.write(record)
        except DalsegnoError as error:
            log.error("%s: %s", record.run, error)

    def _argv(self, record: RunRecord) -> tuple[str, ...]:
        return (*self.launcher, PROGRAM, record.folder)

    def _orphans(self) -> dict[tuple[tuple[str, ...], int], Process]:
        """Return the running coordinators by command line and owner."""
        found = find(lambda pid: PROGRAM in arguments(pid))
        return {(tuple(arguments(one.pid)), uid): one for one in found if (uid := owner(one.pid)) is not None}
