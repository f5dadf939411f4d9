"""On a node, inside a job of the user's: `break-worker WISH` touches the workers of this one job, and nothing of
anybody else's. The wish is JSON, and so is the line that says what was done.

What lasts for a while is held by this process itself: however it ends, unless it is killed, the worker goes on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from dalsegno.errors import DalsegnoError, NotThere
from dalsegno.system.children import PROC, Process, arguments, environment, find, owner, send, stop
from dalsegno.targets.base import NodeWorker
from dalsegno.targets.workers import SeenProcess, choose, find_workers, see

PROGRAM = "break-worker"
KILL, HANG, SLOW, CLEAR, LOOK = "worker-kill", "worker-hang", "slow-gpu", "clear", "look"
SLOW_S, FAST_S = 0.2, 0.1  # still for two thirds of the time, as with a clock at a third


@dataclass(frozen=True)
class WantedWorker:
    """Which worker: by run and rank, or the one of a GPU, which is the one in this place on the node."""

    job: str
    what: str
    run: str | None = None
    rank: int | None = None
    gpu: int | None = None
    for_s: float | None = None


def main(arguments: list[str]) -> int:
    try:
        _carry_out(WantedWorker(**json.loads(arguments[0])), _say)
    except DalsegnoError as error:
        _say({"error": error.what, "hint": error.hint})
    return 0


def _say(facts: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def _carry_out(wish: WantedWorker, say: Callable[[dict[str, object]], None]) -> None:
    if wish.what == LOOK:
        say({"found": _lasting(wish.job)})
    elif wish.what == CLEAR:
        say({"found": _clear(wish.job)})
    else:
        worker, process = _choose(wish)
        if wish.what == KILL:
            send(process, signal.SIGKILL)
            say(asdict(worker))
        else:
            _hold(wish, worker, process, say)


def _choose(wish: WantedWorker) -> tuple[NodeWorker, Process]:
    node = os.environ.get("SLURMD_NODENAME", "this node")
    if wish.gpu is None:
        return choose(_seen(wish.job), node, wish.run, wish.rank)
    workers = list(find_workers(_seen(wish.job)).items())
    if wish.gpu < len(workers):
        return workers[wish.gpu]
    raise NotThere(f"no run of yours has a worker for GPU {wish.gpu} on {node}", hint=f"it has {len(workers)} there")


def _own(job: str) -> list[Process]:
    """Those of this job that are the user's."""
    mark, uid = f"SLURM_JOB_ID={job}".encode(), os.geteuid()
    return find(lambda pid: owner(pid) == uid and mark in environment(pid))


def _seen(job: str) -> list[SeenProcess]:
    return [seen for process in _own(job) if (seen := see(process.pid)) is not None]


def _hold(wish: WantedWorker, worker: NodeWorker, process: Process, say: Callable[[dict[str, object]], None]) -> None:
    """Still, or slow, until the time is over; a worker that stays still until somebody clears it needs no holder."""
    if wish.what == HANG and wish.for_s is None:
        send(process, signal.SIGSTOP)
        say(asdict(worker))
        return
    with _going_on_afterwards(process) as ended:
        until = None if wish.for_s is None else time.monotonic() + wish.for_s
        send(process, signal.SIGSTOP)
        say(asdict(worker))
        while process.alive() and not ended() and (until is None or time.monotonic() < until):
            time.sleep(SLOW_S)
            if wish.what == SLOW:
                send(process, signal.SIGCONT)
                time.sleep(FAST_S)
                send(process, signal.SIGSTOP)


@contextmanager
def _going_on_afterwards(process: Process) -> Iterator[Callable[[], bool]]:
    """Asked to end, by whomever, we end in peace: the worker must not stay still for it."""
    asked = list[int]()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, frame: asked.append(got))
    try:
        yield lambda: bool(asked)
    finally:
        send(process, signal.SIGCONT)


def _lasting(job: str) -> list[str]:
    holders = [_wish_of(process).what for process in _holders(job)]
    return holders or [HANG for _ in _still(job)]


def _clear(job: str) -> list[str]:
    """What lasted."""
    found = _lasting(job)
    stop(_holders(job))
    for process in _still(job):
        send(process, signal.SIGCONT)
    return found


def _holders(job: str) -> list[Process]:
    """Programs such as this one, which keep a worker still or slow."""
    like_us = [one for one in _own(job) if one.pid != os.getpid() and arguments(one.pid)[-2:-1] == [PROGRAM]]
    return [process for process in like_us if _wish_of(process).what in (HANG, SLOW)]


def _wish_of(process: Process) -> WantedWorker:
    try:
        return WantedWorker(**json.loads(arguments(process.pid)[-1]))
    except (ValueError, TypeError, IndexError):
        return WantedWorker("", "")


def _still(job: str) -> list[Process]:
    return [process for process in find_workers(_seen(job)).values() if _state(process.pid) == "T"]


def _state(pid: int) -> str:
    try:
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""
