"""What the warm parent is asked to fork, as messages: a worker, or the store. And where each writes."""

from __future__ import annotations

import os
from pathlib import Path

from dalsegno.launch.agent.crew import Worker
from dalsegno.launch.agent.orders import Setup, WorkerOrder
from dalsegno.launch.folder import RunFolder
from dalsegno.train.contract import AGENT
from dalsegno.train.frames import Message

STORE_FILE = str(Path(__file__).with_name("store.py"))


def worker_task(setup: Setup, warm: bool, worker: Worker, order: WorkerOrder, door: str) -> Message:
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
