"""Collect evidence from a node before it is reset, rebooted or replaced, and free shared memory that runs have left.

Evidence is a number of text files. Of a long file, only the end is kept.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from dalsegno.health.local_machine import slurm_conf
from dalsegno.health.messages import Finding, NodeReport, report_message
from dalsegno.health.telemetry import telemetry_path
from dalsegno.system import children
from dalsegno.system.hanging_calls import NoAnswer, ask
from dalsegno.train.contract import RUN
from dalsegno.train.memory.files import ALONE, SHM, last_written, list_user_folders, run_of, sweep_all

MAX_BYTES = 256 << 10  # maximum size of one file; only the end of a longer one is kept
COMMAND_S = 5.0
COMMANDS: Mapping[str, Sequence[str]] = {
    "dmesg.txt": ("dmesg", "--time-format=iso"),
    "ps.txt": ("ps", "-eo", "pid,ppid,user,stat,wchan:24,rss,etimes,args", "--sort=-rss"),
    "nvidia-smi.txt": ("nvidia-smi", "-q"),
    "nvlink.txt": ("nvidia-smi", "nvlink", "-e"),
    "ip.txt": ("ip", "-s", "address"),
    "df.txt": ("df", "-P", "-l"),
    "free.txt": ("free", "-m"),
    "mounts.txt": ("cat", "/proc/self/mounts"),
}
SLURMD_LOGS = ("/var/log/slurm/slurmd.log", "/var/log/slurmd.log", "/var/log/slurm-llnl/slurmd.log")

Ask = Callable[[Sequence[str]], str]


def gather(
    node: str, boot: str, findings: tuple[Finding, ...], env: Mapping[str, str], ask: Ask | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each file. If a source is not available, the text says why."""
    ask = ask or _ask
    yield "findings.json", json.dumps(report_message(NodeReport(node, boot, findings)), indent=1)
    if telemetry := telemetry_path(env):
        yield "telemetry.json", _tail(telemetry)
    for name, argv in COMMANDS.items():
        yield name, ask(argv)[-MAX_BYTES:]
    if log := slurmd_log(node, env):
        yield "slurmd.log", _tail(log)


def slurmd_log(node: str, env: Mapping[str, str]) -> Path | None:
    """Return the path of slurmd's log, as slurm.conf names it; None if there is no such file.

    If slurm.conf names no log, the usual paths are tried or, on a simulated node, the path beside its telemetry.
    """
    configured, telemetry = _configured_log(node, env), telemetry_path(env)
    candidates = [configured] if configured else [str(telemetry.with_name("slurmd.log"))] if telemetry else SLURMD_LOGS
    return next((Path(path) for path in candidates if os.path.isfile(path)), None)


def _configured_log(node: str, env: Mapping[str, str]) -> str:
    try:
        lines = slurm_conf(env).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    found = [line.partition("=")[2].strip() for line in lines if line.lower().lstrip().startswith("slurmdlogfile")]
    return found[-1].replace("%n", node).replace("%h", os.uname().nodename) if found else ""


def _ask(argv: Sequence[str]) -> str:
    try:
        done = ask(argv, env={**os.environ, "LC_ALL": "C.UTF-8"}, timeout_s=COMMAND_S)
    except NoAnswer as error:
        return f"{error}\n"
    return f"{done.stdout}{done.stderr}" or f"(no output; exit code {done.exit_code})\n"


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - MAX_BYTES, 0))
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError as error:
        return f"{path}: {error.strerror}\n"


# Shared memory that runs have left on this node. It is freed when no process is left that could use it.


EVERY_S = 10.0
FRESH_S = 10.0  # shared memory that was written within this time is in use, so processes are not searched
UNUSED_S = 30.0  # memory without a process is freed after this time; a run restarts its agent sooner

Run = tuple[int, str]  # uid and run id
_FILES = re.compile(rb"/dalsegno\.[0-9.]+/([^/\n]+)")


class SharedMemorySweeper:
    """Frees the shared memory of runs that have ended: as root for all users, otherwise only for the agent's user."""

    def __init__(self, folder: Path = SHM, uid: int | None = None) -> None:
        self._folder, self._due = folder, float("-inf")
        self._uid = os.geteuid() if uid is None else uid
        self._unused: dict[Run, float] = {}  # run -> since when it has had no process here

    def tidy(self, now: float) -> list[Run]:
        """Free unused memory if a sweep is due at `now` (monotonic), and return the runs whose memory was freed."""
        if now < self._due:
            return []
        self._due, fresh = now + EVERY_S, time.time() - FRESH_S
        folders = [(uid, path) for uid, path in list_user_folders(self._folder) if self._uid in (0, uid)]
        written = [((uid, run), at) for uid, path in folders for run, at in last_written(path, uid).items()]
        old = [run for run, at in written if at < fresh and not run[1].startswith(ALONE)]
        unused = set(old) - running(old)
        self._unused = {run: self._unused.get(run, now) for run in unused}
        due = {run for run, since in self._unused.items() if now - since >= UNUSED_S}
        gone = due - mapped(due)
        for owner, path in folders:
            if own := {run for uid, run in gone if uid == owner}:
                sweep_all(own, path, owner)
        return sorted(gone)


def running(runs: Collection[Run]) -> set[Run]:
    """Return the runs with a live process of their user on this node: a run agent, or a process that it started."""
    marks = {(uid, word.encode()): (uid, run) for uid, run in runs for word in (run, f"{RUN}={run}")}
    found = set[Run]()
    for uid, pid in _processes({uid for uid, _ in runs}):
        words = [*children.environment(pid), *(word.encode() for word in children.arguments(pid))]
        found |= {marks[uid, word] for word in words if (uid, word) in marks}
    return found


def mapped(runs: Collection[Run]) -> set[Run]:
    """Return the runs whose files are mapped by any process of their user. This test is slow, so it comes last."""
    found = set[Run]()
    for uid, pid in _processes({uid for uid, _ in runs}):
        names = {name.decode(errors="replace") for name in _FILES.findall(children.mapped(pid))}
        found |= {(uid, run) for name in names if (run := run_of(name.removesuffix(" (deleted)")))}
    return found & set(runs)


def _processes(users: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield the uid and PID of each process of these users."""
    for name in os.listdir(children.PROC) if users else ():
        uid = children.owner(int(name)) if name.isdigit() else None
        if uid is not None and uid in users:
            yield uid, int(name)
