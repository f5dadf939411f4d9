"""The workers of one generation on one node: running workers, and reports about ended ones."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dalsegno.runs.agent.evidence import gather, last_error_line, oom_kills, size_of
from dalsegno.runs.agent.flight_dump import own_prefix, read_torch_version, recorder_settings
from dalsegno.runs.agent.orders import Setup, WorkerOrder
from dalsegno.runs.folder import RunFolder
from dalsegno.train.contract import AGENT, GENERATION
from dalsegno.wire.frames import Message

Report = dict[str, Any]

_MAX_TRACEBACK_BYTES = 512 << 10  # limit for all tracebacks in one message, encoded as JSON; half of a message's limit
_MAX_CHAR_BYTES = 12  # maximum length of one character in JSON


@dataclass
class WorkerProcess:
    """One worker process. Its pid is 0 until it is forked."""

    rank: int
    log: str
    error_file: str
    log_start: int  # offset of this process's output in the log
    pid: int = 0
    output: str = ""
    stacks: str = ""
    flight: str = ""  # the file to which the worker dumps its flight recorder; "" if it cannot
    flight_socket: str = ""  # the abstract socket on which the worker receives requests for dumps


@dataclass
class GenerationWorkers:
    """The workers of a generation. `reports` stay available, because a restarted coordinator needs them again."""

    generation: int
    workers: dict[int, WorkerProcess] = field(default_factory=dict)  # workers by rank
    reports: dict[int, Report] = field(default_factory=dict)
    oom_before: int = field(default_factory=oom_kills)

    def add(
        self,
        rank: int,
        log: str,
        output: str | None = None,
        error_file: str | None = None,
        stacks: str = "",
        flight: str = "",
    ) -> WorkerProcess:
        """Add a worker. `log` is the file for its stderr and, by default, its stdout; "" means the agent's output."""
        beside = log[: -len(".log")] + ".error.json" if error_file is None else error_file
        with contextlib.suppress(OSError):
            os.unlink(beside)  # the file may be left from an earlier process
        worker = WorkerProcess(
            rank,
            log,
            beside,
            size_of(log),
            output=log if output is None else output,
            stacks=stacks,
            flight=flight,
            # The name is random, because another user could bind a predictable one first.
            flight_socket=f"dalsegno.flight.{secrets.token_hex(8)}" if flight else "",
        )
        self.workers[rank] = worker
        return worker

    def by_pid(self, pid: int) -> WorkerProcess | None:
        return next((worker for worker in self.workers.values() if worker.pid == pid), None)

    def ended(self, worker: WorkerProcess, code: int) -> Report:
        """Record the end of a worker and return a report, which includes evidence of the cause."""
        report: Report = {"generation": self.generation, "rank": worker.rank, "code": code}
        if code != 0:
            evidence = gather(worker.log, worker.error_file, worker.log_start)
            report.update(evidence or (last_error_line(worker.log, worker.log_start) if code > 0 else {}))
            report["oom"] = code == -9 and oom_kills() > self.oom_before
        self.reports[worker.rank] = report
        return report

    def running(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers.values() if worker.rank not in self.reports]

    def failing(self) -> list[Report]:
        """Return reports about workers that have written an error but still run and are about to be killed."""
        found = []
        for worker in self.running():
            evidence = gather(worker.log, worker.error_file, worker.log_start)
            if evidence:
                found.append({"generation": self.generation, "rank": worker.rank, "code": 1, **evidence})
        return found


def trim_reports(reports: list[Report]) -> list[Report]:
    """Cut long tracebacks at the start, so that all reports fit into one message, and return the reports."""
    share = _MAX_TRACEBACK_BYTES // max(1, len(reports))
    return [_shortened(report, share) for report in reports]


def _shortened(report: Report, max_bytes: int) -> Report:
    traceback = report.get("traceback", "")
    if len(json.dumps(traceback)) <= max_bytes:
        return report
    return {**report, "traceback": traceback[-(max_bytes // _MAX_CHAR_BYTES) :]}


# Tasks for the warm parent: workers and the store, and the files they write


STORE_FILE = str(Path(__file__).with_name("store.py"))


def worker_task(setup: Setup, warm: bool, worker: WorkerProcess, order: WorkerOrder, socket_name: str) -> Message:
    """Return the task that starts one worker."""
    own = {AGENT: socket_name, "TORCHELASTIC_ERROR_FILE": worker.error_file}
    python = [] if warm or not setup.is_python else [setup.python, "-u"]
    module = ["-m"] if setup.module and python else []
    argv: list[str] = [*python, *module, setup.script, *(order.args or setup.args)]
    return {
        "kind": "script" if warm else "program",
        "name": f"ds:w{worker.rank}",
        "env": {**_recorder_settings(setup, warm, order), **os.environ, **setup.env, **own, **order.env},
        "cwd": setup.cwd,
        "script": argv[0],
        "args": argv[1:],
        "module": setup.module,
        "stdout": worker.output,
        "stderr": worker.log,
        "stacks": worker.stacks,
        # Under torchrun, a worker has its own log files, and gets no variables except those that torchrun sets.
        "flight": [worker.flight_socket, worker.flight, not order.files] if worker.flight else [],
    }


def _recorder_settings(setup: Setup, warm: bool, order: WorkerOrder) -> dict[str, str]:
    """Return the variables that make torch write its own dumps to the run folder.

    Only a worker that is started as a separate program gets them from the agent. A forked worker sets them itself
    (`flight_dump.py`).
    """
    generation = order.env.get(GENERATION, "")
    if warm or "TORCHELASTIC_RUN_ID" not in order.env or not setup.folder or not generation.isdigit():
        return {}
    prefix = own_prefix(_ready(RunFolder(Path(setup.folder)).flight_dump(int(generation), order.rank)))
    return recorder_settings(prefix, _torch_version(setup.python), {**os.environ, **setup.env, **order.env})


def _torch_version(python: str) -> str:
    """Return the version of torch in this Python's environment, from its files; "" if it cannot be found there."""
    if not os.path.isabs(python):
        return ""
    folders = Path(python).parent.parent.glob("lib/python3*/site-packages/torch")
    return next((version for folder in folders if (version := read_torch_version(str(folder)))), "")


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


def run_files(folder: str, generation: int, rank: int, flight: bool = False) -> dict[str, str]:
    """Return the paths of one worker's files in the run folder.

    `flight` says whether the worker can dump its flight recorder.
    """
    run = RunFolder(Path(folder))
    return {
        "log": _ready(run.log(generation, rank)),
        "stacks": _ready(run.stacks(generation, rank)),
        "flight": _ready(run.flight_dump(generation, rank)) if flight else "",
    }


def _ready(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(path)
