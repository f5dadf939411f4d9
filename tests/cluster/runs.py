"""Runs on a real cluster for tests.

A test starts one with `Run.start(cli, folder, "-N", "4")`, on a cluster such as `cluster_for_runs`. Its
state is read from the run folder and from /proc, which shows the processes of virtual hosts.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from dalsegno.runs.folder import RunFolder
from dalsegno.runs.journal import Entry, read
from dalsegno.runs.status import NodeRole, RunStatus, read_status
from dalsegno.system.cgroups import cluster_folders
from dalsegno.system.children import Process, arguments, environment, find
from dalsegno.system.hanging_calls import slowness
from dalsegno.system.hosts import host_process
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.placement import ROOM
from dalsegno.train.memory.safe_steps import NOTHING_SAFE, SafeSteps, read_safe
from tests.cluster.conftest import Cli
from tests.cluster.programs import programs
from tests.waiting import PATIENCE, eventually

LONG_S = 180.0 * slowness() * PATIENCE  # timeout for actions that take a few seconds on an idle machine
FEW_S = 90.0 * slowness() * PATIENCE

# In both scripts, all ranks step in lockstep until their stop file exists. Every completed step adds a line to the
# rank's log and a line to a file that all ranks of all generations share: generation, rank, step, pid, time. A thread
# adds lines with step 0 to that file, even while other ranks hang or die. These lines show a rank that fails to end.
STEPPING = """
import os, socket, sys, threading, time

stop, steps = sys.argv[1:3]
generation, rank = int(os.environ["DALSEGNO_GENERATION"]), int(os.environ.get("RANK") or os.environ["JAX_PROCESS_ID"])
shared = os.open(steps, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

def tell(step):
    os.write(shared, f"{generation} {rank} {step} {os.getpid()} {time.time():.3f}\\n".encode())

def tick():
    while True:
        tell(0)
        time.sleep(0.1)

threading.Thread(target=tick, daemon=True).start()
"""
# Trains a Linear over gloo.
DDP = f"""{STEPPING}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
print("nodes", dist.get_world_size(), "of", os.environ["DALSEGNO_WANTED_NODES"], flush=True)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step, done = 0, torch.zeros(1)
while True:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    done[0] = rank == 0 and os.path.exists(stop)
    dist.broadcast(done, 0)
    step += 1
    print("step", step, flush=True)
    tell(step)
    if done[0]:
        break
    time.sleep(0.15)
dist.destroy_process_group()
"""
# Waits for all ranks at every step, over TCP through rank 0. As with gloo, a rank fails if another has ended, and waits
# forever if the host of another rank is silent. With `QUICK`, its warm parents start in a tenth of the time that torch
# takes.
QUICK = ("--framework", "jax", "--preload", "json")  # workers are forked as with torch, but without its imports
IN_STEP = f"""{STEPPING}
size = int(os.environ["JAX_NUM_PROCESSES"])
host, port = os.environ["JAX_COORDINATOR_ADDRESS"].rsplit(":", 1)

def received(peer):
    data = peer.recv(1)
    if not data:
        raise ConnectionError("Connection closed by peer")
    return data

def connected():
    while True:
        try:
            return socket.create_connection((host, int(port)))
        except OSError:  # rank 0 does not listen yet
            time.sleep(0.02)

if rank == 0:
    with socket.create_server(("", int(port))) as server:
        peers = [server.accept()[0] for _ in range(size - 1)]
else:
    peers = [connected()]
print("nodes", size, "of", os.environ["DALSEGNO_WANTED_NODES"], flush=True)
step, done = 0, b"."
while done == b".":
    if rank == 0:
        for peer in peers:
            received(peer)
        done = b"!" if os.path.exists(stop) else b"."
        for peer in peers:
            peer.sendall(done)
    else:
        peers[0].sendall(b".")
        done = received(peers[0])
    step += 1
    print("step", step, flush=True)
    tell(step)
    time.sleep(0.15)
"""


class Step(NamedTuple):
    """A completed step of one rank. Step 0 only shows that the rank is alive."""

    generation: int
    rank: int
    step: int
    pid: int
    at: float


class Footprint(NamedTuple):
    """The listening TCP ports and shared-memory files of a cluster's hosts."""

    ports: frozenset[tuple[str, int]]
    memory: frozenset[tuple[str, str]]


@dataclass
class Run:
    """A started run; `work` is the folder it was started in."""

    cli: Cli
    work: Path
    folder: RunFolder
    before: Footprint
    _steps: list[Step] = field(default_factory=list, repr=False)
    _read_to: int = 0

    @classmethod
    def start(cls, cli: Cli, work: Path, *options: str, script: str = DDP, args: tuple[str, ...] | None = None) -> Run:
        """Start `dalsegno run --detach OPTIONS train.py ARGS`. A custom script gets only the given arguments."""
        work.mkdir(parents=True, exist_ok=True)
        (work / "train.py").write_text(script)
        given = (str(work / "stop"), str(work / "steps")) if args is None else args
        before = footprint(cli)
        run = cli.ok("run", "--detach", *options, "train.py", *given, cwd=work).strip()
        return cls(cli, work, RunFolder(cli.home / "runs" / run), before)

    @property
    def id(self) -> str:
        return self.folder.run

    # Status

    @property
    def status(self) -> RunStatus:
        status = read_status(self.folder.status)
        if status is None:
            raise LookupError(f"{self.id} has not said anything of itself yet")
        return status

    def journal(self, event: str = "", since: float = 0.0) -> list[Entry]:
        """Return the journal entries since a time (seconds since 1970), of one kind if `event` is given."""
        entries = read(self.folder.journal)
        return [each for each in entries if each["at"] >= since and event in ("", each["event"])]

    @property
    def generation(self) -> int:
        """The latest generation; 0 before the first."""
        return max((each["generation"] for each in self.journal("generation")), default=0)

    @property
    def restarts(self) -> int:
        """The number of restarts after worker failures."""
        return int(self.journal("generation")[-1]["restarts"])

    @property
    def nodes(self) -> list[str]:
        """The nodes of the latest generation, by group rank."""
        return list(self.journal("generation")[-1]["nodes"])

    @property
    def spares(self) -> list[str]:
        return [node.name for node in self.status.nodes if node.state is NodeRole.SPARE]

    def log(self, rank: int, generation: int | None = None) -> str:
        path = self.folder.log(generation or self.generation, rank)
        return path.read_text() if path.exists() else ""

    def steps(self, rank: int | None = None, generation: int | None = None) -> list[Step]:
        """Return completed steps of the DDP script, of one rank and generation if they are given."""
        found = [each for each in self.writes() if each.step and rank in (None, each.rank)]
        return [each for each in found if generation in (None, each.generation)]

    def writes(self) -> list[Step]:
        """Return all lines of the DDP script, of all generations, in the order in which they were written."""
        if (self.work / "steps").exists():
            with open(self.work / "steps", "rb") as file:
                file.seek(self._read_to)
                whole = file.read().rpartition(b"\n")[0]
            self._read_to += len(whole) + bool(whole)
            self._steps += [_step(line) for line in whole.decode().splitlines()]
        return self._steps

    def assert_fenced(self) -> None:
        """Check that no generation wrote anything after the first step of the next one."""
        writes = self.writes()
        first = {each.generation: number for number, each in reversed(list(enumerate(writes))) if each.step}
        for old, new in pairwise(sorted(first)):
            late = [each for each in writes[first[new] :] if each.generation < new]
            began = writes[first[new]].at
            assert not late, f"{late[-1]} wrote {late[-1].at - began:.2f} s into generation {new}, after {old}"

    # Waiting

    def wait_for(self, true: Callable[[], object], timeout_s: float = FEW_S) -> None:
        """Wait for a condition; on failure, show the run's journal."""
        try:
            eventually(true, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.tail()}") from None

    def tail(self) -> str:
        lines = [str(each) for each in self.journal()[-25:]]
        logs = [self.folder.coordinator_log, self.folder.agents_log]
        said = [f"{path.name}: {path.read_text()[-1500:]}" for path in logs if path.exists()]
        return "\n".join([str(self.status), *lines, *said])

    def wait_for_generation(self, number: int, timeout_s: float = FEW_S) -> None:
        self.wait_for(lambda: self.generation >= number, timeout_s)

    def wait_for_step(self, generation: int = 0, after: float = 0.0, timeout_s: float = FEW_S) -> float:
        """Wait until every rank of this or a later generation has completed a step after this time (Unix seconds).

        Return when the last rank did so.
        """
        found: list[float] = []

        def stepped() -> bool:
            found[:] = self._first_steps(max(generation, self.generation), after)
            return bool(found)

        self.wait_for(stepped, timeout_s)
        return max(found)

    def _first_steps(self, generation: int, after: float) -> list[float]:
        """Return the first step of every rank of this generation; empty while one is missing."""
        formed = [each for each in self.journal("generation") if each["generation"] == generation]
        first: dict[int, float] = {}
        for step in self.steps(generation=generation):
            if step.at > after:
                first.setdefault(step.rank, step.at)
        size = len(formed[0]["nodes"]) * formed[0]["nproc_per_node"] if formed else 1
        return list(first.values()) if len(first) == size else []

    def wait_for_spares(self, number: int, timeout_s: float = LONG_S) -> None:
        self.wait_for(lambda: len(self.spares) >= number, timeout_s)

    # Processes, by their PIDs on the machine

    def processes(self) -> list[int]:
        """Return all processes with the run's id in their arguments or environment."""
        mark = re.compile(rf"(?<![\w-]){re.escape(self.id)}(?![\w-])")
        return [
            process.pid
            for process in find(
                lambda pid: (
                    any(map(mark.search, arguments(pid)))
                    or any(mark.search(each.decode(errors="replace")) for each in environment(pid))
                )
            )
        ]

    def workers(self) -> dict[int, int]:
        """Return the workers by rank."""
        named = {comm(pid): pid for pid in self.processes()}
        return {int(name[4:]): pid for name, pid in named.items() if name.startswith("ds:w")}

    def agents(self) -> dict[str, int]:
        """Return the agents by node."""
        found = [pid for pid in self.processes() if arguments(pid)[-2:] == ["run-agent", self.id]]
        # srun has the same command line as the agents.
        return {node_of(pid): pid for pid in found if comm(pid) != "srun"}

    def warm_parents(self) -> dict[str, int]:
        """Return the children of the agents by node."""
        agents = set(self.agents().values())
        return {node_of(pid): pid for pid in self.processes() if parent_of(pid) in agents}

    def sruns(self) -> list[int]:
        """Return the sruns of the agents, oldest first, without their child processes of the same name."""
        found = [pid for pid in self.processes() if comm(pid) == "srun"]
        return [pid for pid in found if parent_of(pid) not in found]

    def coordinator(self) -> int | None:
        found = programs(self.processes(), lambda words: "run-coordinator" in words)
        return found[0] if found else None

    # Snapshots

    def safe(self) -> SafeSteps:
        """Return the newest step that its hosts know to survive the loss of any single node."""
        name = f"dalsegno.*/{self.id}.safe"
        found = [each for host in _hosts(self.cli).values() for each in Path(_shared_memory(host)).glob(name)]
        words = [read_safe(path) or NOTHING_SAFE for path in found]
        return max(words, key=lambda word: (word.generation, word.place), default=NOTHING_SAFE)

    # End

    def finish(self, timeout_s: float = LONG_S) -> int:
        """Ask the script to end, and return the run's exit code."""
        (self.work / "stop").touch()
        return self.wait_for_end(timeout_s)

    def wait_for_end(self, timeout_s: float = LONG_S) -> int:
        self.wait_for(lambda: self.status.over, timeout_s)
        code = self.status.exit_code
        assert code is not None
        return code

    def no_trace(self) -> None:
        """Check that nothing of the run is left anywhere."""
        try:
            eventually(
                lambda: not self.traces(), LONG_S
            )  # the node agents free the run's shared memory on nodes that the run had lost
        except AssertionError:
            raise AssertionError(f"left behind: {self.traces()}; {self.tail()}") from None

    def traces(self) -> list[str]:
        now = footprint(self.cli)
        jobs = self.cli.ok("shell", "--", "squeue", "-h", "-o", "%i %j %T").splitlines()
        return [
            *(f"process {pid} {comm(pid)} {arguments(pid)}" for pid in self.processes()),
            *(f"process {pid} {comm(pid)} {arguments(pid)} in a job's cgroup" for pid in self._in_cgroups()),
            *(f"job {job}" for job in jobs if self.id in job),
            *(f"port {port} on {host}" for host, port in now.ports - self.before.ports),
            *(f"shared memory {self._shown(host, name)} on {host}" for host, name in now.memory - self.before.memory),
            *(f"file {path}" for path in self._temporary_files()),
        ]

    def _shown(self, host: str, name: str) -> str:
        """Return a name in a host's shared memory, followed by its content if the name is that of a folder."""
        with contextlib.suppress(OSError, KeyError):
            return f"{name} {sorted(os.listdir(Path(_shared_memory(_hosts(self.cli)[host])) / name))}"
        return name

    def _temporary_files(self) -> list[Path]:
        """Return files in $TMPDIR and other temporary folders, except torch's cache of compiled code."""
        own = [path for path in (self.cli.home / "tmp").iterdir() if not path.name.startswith("torchinductor_")]
        return [*own, *(path for path in Path("/tmp").iterdir() if self.id in path.name)]

    def _in_cgroups(self) -> list[int]:
        """Return the processes in the cgroups of its jobs, whatever their name or environment is."""
        jobs = {each["job"] for each in self.journal("granted")}
        places = cluster_folders(_folder(self.cli).id)
        folders = [path for place in places for job in jobs for path in place.rglob(f"job_{job}")]
        files = [path for folder in folders for path in folder.rglob("cgroup.procs")]
        return [int(pid) for path in files for pid in _words(path)]


def footprint(cli: Cli) -> Footprint:
    """Return the footprint of all live hosts of the cluster."""
    alive = _hosts(cli)
    ports = {(name, port) for name, process in alive.items() for port in _listening(process)}
    memory = {(name, each) for name, process in alive.items() for each in os.listdir(_shared_memory(process))}
    return Footprint(frozenset(ports), frozenset(memory))


def _folder(cli: Cli) -> Folder:
    (path,) = (cli.home / "clusters").iterdir()
    return Folder(path)


def _hosts(cli: Cli) -> dict[str, Process]:
    """Return the live hosts, except the machine room, which runs on the machine itself."""
    folders = [path for path in sorted((_folder(cli).root / "hosts").iterdir()) if path.name != ROOM]
    hosts = {path.name: host_process(path) for path in folders}
    return {name: process for name, process in hosts.items() if process is not None}


def _shared_memory(host: Process) -> str:
    return f"/proc/{host.pid}/root/dev/shm"


def _listening(host: Process) -> list[int]:
    lines = [line for kind in ("tcp", "tcp6") for line in _text(f"/proc/{host.pid}/net/{kind}").splitlines()[1:]]
    fields = [line.split() for line in lines]
    return [int(each[1].rpartition(":")[2], 16) for each in fields if each[3] == "0A"]


def comm(pid: int) -> str:
    return _text(f"/proc/{pid}/comm").strip()


def parent_of(pid: int) -> int:
    """Return the parent's PID; 0 if there is no such process."""
    after_name = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(after_name[1]) if after_name else 0


def node_of(pid: int) -> str:
    """Return the node of a process that Slurm started."""
    name = b"SLURMD_NODENAME="
    return next((each[len(name) :].decode() for each in environment(pid) if each.startswith(name)), "")


def now() -> float:
    """Return the time on the clock of journals and steps."""
    return time.time()


def kill(pid: int | None, number: int = 9) -> None:
    assert pid
    os.kill(pid, number)


def _step(line: str) -> Step:
    generation, rank, step, pid, at = line.split()
    return Step(int(generation), int(rank), int(step), int(pid), float(at))


def _words(path: Path) -> list[str]:
    return _text(str(path)).split()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
