"""The program `break-worker REQUEST`. It runs on a node as the user and injects a fault into one of the user's workers.

`own_jobs` starts it as a step of a job; it then affects only that job. `methods` starts it for bit flips. The request
is JSON, and the answer is one line of JSON. To keep a worker slow, or stopped for a limited time, the program keeps
running. When it ends, it resumes the worker, unless it was killed with SIGKILL.
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
from dalsegno.inject.workers import NodeWorker, SeenProcess, choose, find_workers, inspect
from dalsegno.system.children import PROC, Process, arguments, environment, find, owner, send, stop
from dalsegno.train.memory.files import create_own, find_folder, flip_name, own_folder, remove_folder

PROGRAM = "break-worker"
KILL, HANG, SLOW, CLEAR, LOOK = "worker-kill", "worker-hang", "slow-gpu", "clear", "look"
FLIP, UNFLIP = "bit-flip", "bit-flip-end"
SLOW_S, FAST_S = 0.2, 0.1  # a slow worker is stopped for two thirds of the time, like a GPU at a third of its clock


@dataclass(frozen=True)
class WantedWorker:
    """A request to the program. It selects a worker by run and rank, or by the worker's index on the node (`gpu`).

    A request to clear selects faults by name (`fault`); None selects all of them.
    """

    job: str
    what: str
    run: str | None = None
    rank: int | None = None
    gpu: int | None = None
    for_s: float | None = None
    fault: str | None = None


def main(arguments: list[str]) -> int:
    try:
        _carry_out(WantedWorker(**json.loads(arguments[0])), _answer)
    except DalsegnoError as error:
        _answer({"error": error.what, "hint": error.hint})
    return 0


def _answer(facts: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def _carry_out(wanted: WantedWorker, answer: Callable[[dict[str, object]], None]) -> None:
    if wanted.what == LOOK:
        answer({"found": [each.fault for each in _lasting(wanted.job)]})
    elif wanted.what == CLEAR:
        answer({"found": _clear(wanted.job, wanted.fault)})
    elif wanted.what in (FLIP, UNFLIP) and wanted.run is not None and wanted.rank is not None:
        _flip(wanted.run, wanted.rank, wanted.what == FLIP)
        answer({})
    else:
        worker, process = _choose(wanted)
        if wanted.what == KILL:
            send(process, signal.SIGKILL)
            answer(asdict(worker))
        else:
            _hold(wanted, worker, process, answer)


def _choose(wanted: WantedWorker) -> tuple[NodeWorker, Process]:
    node = os.environ.get("SLURMD_NODENAME", "this node")
    if wanted.gpu is None:
        return choose(_seen(wanted.job), node, wanted.run, wanted.rank)
    workers = list(find_workers(_seen(wanted.job)).items())
    if wanted.gpu < len(workers):
        return workers[wanted.gpu]
    raise NotThere(
        f"no run of yours has a worker for GPU {wanted.gpu} on {node}",
        hint=f"number of your workers there: {len(workers)}",
    )


def _own(job: str) -> list[Process]:
    """Return the processes of this job that run as the user of this program."""
    mark, uid = f"SLURM_JOB_ID={job}".encode(), os.geteuid()
    return find(lambda pid: owner(pid) == uid and mark in environment(pid))


def _seen(job: str) -> list[SeenProcess]:
    return [seen for process in _own(job) if (seen := inspect(process.pid)) is not None]


def _hold(
    wanted: WantedWorker, worker: NodeWorker, process: Process, answer: Callable[[dict[str, object]], None]
) -> None:
    """Keep a worker stopped or slow until the time is over. A stop without a time limit outlasts this call."""
    if wanted.what == HANG and wanted.for_s is None:
        send(process, signal.SIGSTOP)
        answer(asdict(worker))
        return
    with _resumed_afterwards(process) as ended:
        until = None if wanted.for_s is None else time.monotonic() + wanted.for_s
        send(process, signal.SIGSTOP)
        answer(asdict(worker))
        while process.alive() and not ended() and (until is None or time.monotonic() < until):
            time.sleep(SLOW_S)
            if wanted.what == SLOW:
                send(process, signal.SIGCONT)
                time.sleep(FAST_S)
                send(process, signal.SIGSTOP)


def _flip(run: str, rank: int, wrong: bool) -> None:
    """Create the file that makes a worker flip a bit of its gradients (`train/corruption.py`); if `wrong` is false,
    remove it."""
    if wrong:
        os.close(create_own(own_folder() / flip_name(run, rank)))
    elif (folder := find_folder()) is not None:
        (folder / flip_name(run, rank)).unlink(missing_ok=True)
        remove_folder(folder)


@contextmanager
def _resumed_afterwards(process: Process) -> Iterator[Callable[[], bool]]:
    """Resume the worker at the end. Yield a function that returns whether a signal has asked this program to end."""
    asked = list[int]()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, frame: asked.append(got))
    try:
        yield lambda: bool(asked)
    finally:
        send(process, signal.SIGCONT)


@dataclass(frozen=True)
class _LastingFault:
    """A lasting fault of a worker. `holder` is the process that causes it; None for a stop without a time limit."""

    fault: str
    worker: Process | None
    holder: Process | None = None


def _lasting(job: str) -> list[_LastingFault]:
    requests = {holder: _request_of(holder) for holder in _holders(job)}
    held = [_LastingFault(wanted.what, _worker_of(wanted), holder) for holder, wanted in requests.items()]
    workers = {each.worker for each in held}
    return [*held, *(_LastingFault(HANG, process) for process in _stopped(job) if process not in workers)]


def _worker_of(wanted: WantedWorker) -> Process | None:
    try:
        return _choose(wanted)[1]
    except NotThere:  # the worker has ended
        return None


def _clear(job: str, fault: str | None) -> list[str]:
    """Undo the faults of a job, or only those with the name `fault`. Return the names of the undone faults."""
    found = [each for each in _lasting(job) if fault in (None, each.fault)]
    stop([each.holder for each in found if each.holder is not None])
    for each in found:
        if each.worker is not None:
            send(each.worker, signal.SIGCONT)  # a holder that had to be killed did not resume its worker
    return [each.fault for each in found]


def _holders(job: str) -> list[Process]:
    """Return other processes of this program that keep a worker stopped or slow."""
    like_us = [one for one in _own(job) if one.pid != os.getpid() and arguments(one.pid)[-2:-1] == [PROGRAM]]
    return [process for process in like_us if _request_of(process).what in (HANG, SLOW)]


def _request_of(process: Process) -> WantedWorker:
    try:
        return WantedWorker(**json.loads(arguments(process.pid)[-1]))
    except (ValueError, TypeError, IndexError):
        return WantedWorker("", "")


def _stopped(job: str) -> list[Process]:
    return [process for process in find_workers(_seen(job)).values() if _state(process.pid) == "T"]


def _state(pid: int) -> str:
    try:
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""
