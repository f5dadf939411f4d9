"""A whole run on one machine: a real coordinator and real agents, each of which acts as a node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any

from dalsegno.runs import journal
from dalsegno.runs.coordinator.coordinator import Coordinator
from dalsegno.runs.coordinator.generations.group import Shape
from dalsegno.runs.coordinator.nodes.node_source import NoNodeSource
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.status import RunStatus, read_status
from dalsegno.system import children
from tests.runs.small_site import SmallSite
from tests.waiting import PATIENCE_S

PROGRAMS = Path(__file__).parents[2] / "src" / "dalsegno" / "programs.py"

# The start of every script. It prints its PID and node, and defines a function that waits for the test.
BEGIN = """
import json, os, signal, socket, sys, time
rank, generation = int(os.environ["RANK"]), int(os.environ["DALSEGNO_GENERATION"])
def wait():
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
print(os.getpid(), os.environ["SLURMD_NODENAME"])
"""


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test of coroutines in its own event loop."""

    @wraps(test)
    def run(*args: Any, **more: Any) -> None:
        asyncio.run(test(*args, **more))  # type: ignore[arg-type]

    return run


class Played:
    """One run. Agents are started by name; `go` releases scripts that wait."""

    def __init__(self, root: Path, script: str, **more: Any) -> None:
        self.folder = RunFolder(root / f"train-{os.getpid()}-{time.monotonic_ns() % 10**9}")
        self.folder.root.mkdir()
        self.go = root / "go"
        path = root / "train.py"
        path.write_text(BEGIN + textwrap.dedent(script))
        self.site = SmallSite(self.folder, script=str(path), args=(str(self.go),), **more)
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.coordinator: Coordinator
        self.task: asyncio.Task[int] | None = None

    # Participants

    async def coordinate(self, gather_s: float = 30.0) -> None:
        self.coordinator = Coordinator(self.site, lambda _: NoNodeSource(), gather_s)
        self.task = asyncio.ensure_future(self.coordinator.serve())
        await self.until(self.folder.connect.exists)

    async def coordinate_elsewhere(self) -> int:
        """Start the coordinator in its own process, which can be killed; return its PID."""
        pid = os.fork()
        if pid == 0:
            try:
                asyncio.set_event_loop(None)
                asyncio._set_running_loop(None)
                asyncio.new_event_loop().run_until_complete(Coordinator(self.site, lambda _: NoNodeSource()).serve())
            finally:
                os._exit(1)
        await self.until(self.folder.connect.exists)
        return pid

    def join(self, *nodes: str, python: str = sys.executable) -> None:
        for node in nodes:
            argv = [python, "-I", str(PROGRAMS), "run-agent", self.folder.run]
            with self.folder.connect.open() as connect, self.folder.agents_log.open("ab") as log:
                env = {**os.environ, "SLURMD_NODENAME": node}
                self.agents[node] = subprocess.Popen(argv, stdin=connect, stderr=log, env=env)

    # Events

    async def until(self, true: Callable[[], object], within_s: float = PATIENCE_S) -> None:
        end = time.monotonic() + within_s
        while not true():
            if self.task is not None and self.task.done():
                self.task.result()  # raises the coordinator's error
            assert time.monotonic() < end, self.events()
            await asyncio.sleep(0.005)

    async def until_runs(self, generation: int = 1, ranks: int = 2) -> None:
        """Wait until every rank of the generation has printed its PID and node."""
        await self.until(lambda: all(self.log(rank, generation) for rank in range(ranks)))

    async def ends(self) -> int:
        assert self.task is not None
        return await asyncio.wait_for(asyncio.shield(self.task), PATIENCE_S)

    def log(self, rank: int, generation: int = 1) -> list[str]:
        """Return the complete lines of the rank's log so far."""
        with contextlib.suppress(FileNotFoundError):
            return self.folder.log(generation, rank).read_text().rpartition("\n")[0].splitlines()
        return []

    def who(self, rank: int, generation: int = 1) -> tuple[int, str]:
        pid, node = self.log(rank, generation)[0].split()
        return int(pid), node

    def events(self) -> list[str]:
        return [str(entry["event"]) for entry in journal.read(self.folder.journal)]

    @property
    def status(self) -> RunStatus:
        status = read_status(self.folder.status)
        assert status is not None
        return status

    def processes(self) -> list[int]:
        """Return all processes with the run's id in their arguments or environment."""
        run = self.folder.run
        mark = f"DALSEGNO_RUN={run}".encode()
        found = children.find(lambda pid: mark in children.environment(pid) or run in children.arguments(pid))
        return [process.pid for process in found if process.pid != os.getpid()]

    async def close(self) -> None:
        for agent in self.agents.values():
            with contextlib.suppress(ProcessLookupError):
                agent.send_signal(signal.SIGCONT)
            agent.kill()
            agent.wait()
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)


@contextlib.asynccontextmanager
async def played(root: Path, script: str, *nodes: str, gather_s: float = 30.0, **more: Any) -> AsyncIterator[Played]:
    """Run a coordinator with agents on these nodes; without nodes, no agent is started yet."""
    played = Played(root, script, **{"shape": Shape(2, 2, 1), **more})
    try:
        if nodes:
            await played.coordinate(gather_s)
            played.join(*nodes)
        yield played
    finally:
        await played.close()
