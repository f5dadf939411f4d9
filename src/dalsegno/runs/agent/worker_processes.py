"""The workers of one generation on one node: who runs, who ended and how."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dalsegno.runs.agent.evidence import gather, last_words, oom_kills
from dalsegno.runs.agent.orders import Setup, WorkerOrder
from dalsegno.runs.folder import RunFolder
from dalsegno.train.contract import AGENT
from dalsegno.wire.frames import Message

Report = dict[str, Any]

_MOST_BYTES = 512 << 10  # of all tracebacks in a message, as JSON: half of what one may have
_CHAR_BYTES = 12  # that one character may take there


@dataclass
class WorkerProcess:
    """One process to be, or that is: pid 0 until it was forked."""

    rank: int
    log: str
    error_file: str
    log_start: int  # where in the log this life of the rank begins
    pid: int = 0
    output: str = ""
    stacks: str = ""


@dataclass
class Crew:
    """`reports` tell of ends; they are kept, since a coordinator that comes back asks for them again."""

    generation: int
    workers: dict[int, WorkerProcess] = field(default_factory=dict)  # by rank
    reports: dict[int, Report] = field(default_factory=dict)
    oom_before: int = field(default_factory=oom_kills)

    def add(
        self, rank: int, log: str, output: str | None = None, error_file: str | None = None, stacks: str = ""
    ) -> WorkerProcess:
        """`log` takes its errors, and its output too unless that goes elsewhere; "" is where the agent's own goes."""
        beside = log[: -len(".log")] + ".error.json" if error_file is None else error_file
        with contextlib.suppress(OSError):
            os.unlink(beside)  # of an earlier life
        worker = WorkerProcess(rank, log, beside, _size(log), output=log if output is None else output, stacks=stacks)
        self.workers[rank] = worker
        return worker

    def by_pid(self, pid: int) -> WorkerProcess | None:
        return next((worker for worker in self.workers.values() if worker.pid == pid), None)

    def ended(self, worker: WorkerProcess, code: int) -> Report:
        """Note an end; what the worker left to tell goes along."""
        report: Report = {"generation": self.generation, "rank": worker.rank, "code": code}
        if code != 0:
            told = gather(worker.log, worker.error_file, worker.log_start)
            report.update(told or (last_words(worker.log, worker.log_start) if code > 0 else {}))
            report["oom"] = code == -9 and oom_kills() > self.oom_before
        self.reports[worker.rank] = report
        return report

    def running(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers.values() if worker.rank not in self.reports]

    def hurt(self) -> list[Report]:
        """Of workers that we are about to kill: those that have already told of an error."""
        found = []
        for worker in self.running():
            told = gather(worker.log, worker.error_file, worker.log_start)
            if told:
                found.append({"generation": self.generation, "rank": worker.rank, "code": 1, **told})
        return found


def fitting(reports: list[Report]) -> list[Report]:
    """Return reports that fit into one message: of long tracebacks, only as much of the end as has room."""
    share = _MOST_BYTES // max(1, len(reports))
    return [_shortened(report, share) for report in reports]


def _shortened(report: Report, most_bytes: int) -> Report:
    traceback = report.get("traceback", "")
    if len(json.dumps(traceback)) <= most_bytes:
        return report
    return {**report, "traceback": traceback[-(most_bytes // _CHAR_BYTES) :]}


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


# ---- What the warm parent is asked to fork, as messages: a worker, or the store. And where each writes.


STORE_FILE = str(Path(__file__).with_name("store.py"))


def worker_task(setup: Setup, warm: bool, worker: WorkerProcess, order: WorkerOrder, door: str) -> Message:
    """What one worker runs, and with which variables; later ones go before earlier ones."""
    own = {AGENT: door, "TORCHELASTIC_ERROR_FILE": worker.error_file}
    python = [] if warm or not setup.is_python else [setup.python, "-u"]
    module = ["-m"] if setup.module and python else []
    argv: list[str] = [*python, *module, setup.script, *(order.args or setup.args)]
    return {
        "kind": "script" if warm else "program",
        "name": f"ds:w{worker.rank}",
        "env": {**os.environ, **setup.env, **own, **order.env},
        "cwd": setup.cwd,
        "script": argv[0],
        "args": argv[1:],
        "module": setup.module,
        "stdout": worker.output,
        "stderr": worker.log,
        "stacks": worker.stacks,
    }


def store_task(setup: Setup, warm: bool, port: int) -> Message:
    task: Message = {"kind": "store", "name": "ds:store", "port": port}
    if warm:
        return task
    log = _ready(RunFolder(Path(setup.folder)).store_log) if setup.folder else ""
    env = {**os.environ, **setup.env}
    argv = [STORE_FILE, "{file}", str(port)]
    return {
        **task, "kind": "program", "script": setup.python, "args": argv, "env": env, "cwd": "/",
        "stdout": log, "stderr": log,
    }  # fmt: skip


def run_files(folder: str, generation: int, rank: int) -> dict[str, str]:
    """Where one life of a rank writes, in the run's folder."""
    run = RunFolder(Path(folder))
    return {"log": _ready(run.log(generation, rank)), "stacks": _ready(run.stacks(generation, rank))}


def _ready(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(path)
