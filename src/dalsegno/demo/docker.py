"""The demo scene of a cancelled job: its program survives in a Docker container, but not in a Dal Segno container."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.containers import parse_name
from dalsegno.containers.import_image import Importer
from dalsegno.containers.store import ImageStore
from dalsegno.demo.researchers import until
from dalsegno.errors import NotThere, TargetError
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import NodeState
from dalsegno.system.children import MARK, Child, Process, descendants, end, marked, start, start_ticks
from dalsegno.system.machine import program
from dalsegno.system.processes import Completed, LocalRunner, Runner

PROGRAM = "sleep 1000"
TOPS = ("slurmstepd", "slurmd", "dockerd", "containerd")  # the list of ancestors ends at one of these services
WAIT_S = 90.0
Notify = Callable[[str], None]


@dataclass(frozen=True)
class NodeProcess:
    """A line of `ps` on the node."""

    pid: int
    parent: int
    user: str
    name: str
    args: str


@dataclass(frozen=True)
class ObservedProgram:
    """Facts about the program of a job, observed while the job runs."""

    pid: int
    user: str
    ancestors: tuple[str, ...]  # the names of the ancestors, the direct parent last
    cgroup: str
    gpu: str
    counted: bool  # whether Slurm lists the program as a process of the job


@dataclass(frozen=True)
class Ending:
    """The end of one job: its command, its program, and whether the program outlived the job."""

    job: int
    command: str
    program: ObservedProgram
    lives_on: bool


@dataclass(frozen=True)
class DockerStage:
    """One node, and the user who submits the jobs. `ask` runs a command on the node as root."""

    slurm: SlurmClient
    researcher: SlurmClient
    node: str
    ask: Callable[[Sequence[str]], str]
    output: Path  # output file of the jobs


def play(stage: DockerStage, command: str, notify: Notify, export: str = "") -> Ending:
    """Submit a job, observe its program, cancel the job, and check whether the program still runs on the idle node."""
    before = {process.pid for process in find(stage)}
    args = ["--gpus=1", f"--output={stage.output}", f"--export=ALL{export and ','}{export}", f"--wrap={command}"]
    job = stage.researcher.submit(args=args)
    notify(f"job {job}: {command}")
    pid = until(lambda: _started(stage, job, before), WAIT_S, f"`{PROGRAM}` of job {job} on {stage.node}")
    program = observe(stage, job, pid)
    notify(f"its program is process {pid} on {stage.node}; now: scancel {job}")
    stage.slurm.cancel(job)
    until(lambda: _is_idle(stage), WAIT_S, f"{stage.node} to be idle again")
    lives_on = any(process.pid == pid for process in find(stage))
    notify(f"job {job} has ended and {stage.node} is idle; its program {'still runs' if lives_on else 'has ended'}")
    return Ending(job, command, program, lives_on)


def _started(stage: DockerStage, job: int, before: set[int]) -> int:
    new = [process.pid for process in find(stage) if process.pid not in before]
    if not new and stage.slurm.job(job).state.ended:
        output = stage.output.read_text(errors="replace").strip() if stage.output.exists() else ""
        raise TargetError(
            f"job {job} ended before its program started: {output or 'no output'}",
            hint="`dalsegno demo --keep` keeps the cluster for inspection",
        )
    return new[0] if new else 0


def _is_idle(stage: DockerStage) -> bool:
    """Return whether the node is idle and not COMPLETING. Slurm has then killed every process that it knows."""
    node = stage.slurm.node(stage.node)
    return node.state is NodeState.IDLE and not node.flags


def find(stage: DockerStage) -> list[NodeProcess]:
    """Return the processes that run PROGRAM. Slurm starts the program with its full path, Docker with its name
    alone."""
    name = PROGRAM.split()[0]
    return [each for each in processes(stage) if each.name == name and each.args.endswith(PROGRAM)]


def observe(stage: DockerStage, job: int, pid: int) -> ObservedProgram:
    known = {process.pid: process for process in processes(stage)}
    counted = stage.ask(["scontrol", "listpids", str(job), stage.node])
    return ObservedProgram(
        pid,
        known[pid].user,
        ancestors(known, pid),
        parse_cgroup(stage.ask(["cat", f"/proc/{pid}/cgroup"])),
        parse_variable(stage.ask(["cat", f"/proc/{pid}/environ"]), "CUDA_VISIBLE_DEVICES"),
        str(pid) in [line.split()[0] for line in counted.splitlines() if line.strip()],
    )


def processes(stage: DockerStage) -> list[NodeProcess]:
    return parse_ps(stage.ask(["ps", "-eo", "pid=,ppid=,user:16=,comm=,args="]))


def parse_ps(text: str) -> list[NodeProcess]:
    found = []
    for line in text.splitlines():
        pid, parent, user, name, args = [*line.split(None, 4), "", "", "", "", ""][:5]
        if pid.isdigit() and parent.isdigit():
            found.append(NodeProcess(int(pid), int(parent), user, name, args))
    return found


def ancestors(known: dict[int, NodeProcess], pid: int) -> tuple[str, ...]:
    """Return the names of the process's ancestors, up to the nearest service of the node (TOPS) or the node's first
    process."""
    names: list[str] = []
    while (process := known.get(known[pid].parent)) is not None:
        names.insert(0, "init" if process.pid == 1 else process.name)
        if process.name in TOPS:
            break
        pid = process.pid
    return tuple(names)


def parse_cgroup(text: str) -> str:
    """Return the cgroup in which Slurm finds a job's processes: the freezer's in cgroup v1, the only one in v2."""
    groups = {kind: path for line in text.splitlines() for _, kind, path in [line.split(":", 2)]}
    return groups.get("freezer") or groups.get("", "")


def parse_variable(environ: str, name: str) -> str:
    return dict(each.partition("=")[::2] for each in environ.split("\0")).get(name, "")


# Docker's daemon runs on one node during the scene, with its files in its own mount namespace.


START_S = 60.0
END_S = 20.0
# The daemon's images, PID files, internal sockets and its key in /etc are in memory. Only the daemon sees them, and
# they disappear when it ends.
PRIVATE = """mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/etc /run/work &&
    mount -t overlay -o lowerdir=/etc,upperdir=/run/etc,workdir=/run/work overlay /etc && exec "$@"
"""
ALONE = ("unshare", "--mount", "--", "/bin/sh", "-c", PRIVATE, "sh")
# The daemon creates no bridge and no firewall rules, so that it does not change the machine's network.
PLAIN = (
    "--data-root=/run/data", "--exec-root=/run/docker", "--pidfile=/run/docker.pid", "--storage-driver=vfs",
    "--exec-opt=native.cgroupdriver=cgroupfs", "--default-cgroupns-mode=private", "--bridge=none",
    "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false",
)  # fmt: skip

OnNode = Callable[[Sequence[str], Mapping[str, str]], tuple[list[str], dict[str, str]]]


def find_programs() -> tuple[str, str]:
    """Return the paths of Docker's daemon and of its client; raise NotThere if Docker is not installed."""
    daemon = program("dockerd")
    if daemon is None:
        raise NotThere(
            "Docker is not installed on this machine",
            hint="`./dalsegno demo --scene docker` from a clone installs it, or: "
            "sudo apt-get install --no-install-recommends docker.io",
        )
    beside = os.pathsep.join([os.path.dirname(daemon), "/usr/bin"])
    return daemon, shutil.which("docker", path=beside) or program("docker") or "docker"


@dataclass(frozen=True)
class Docker:
    """A client of Docker's daemon. It is also the Runner through which an image import calls `docker`."""

    client: str
    socket: Path
    inner: Runner

    @property
    def host(self) -> str:
        return f"unix://{self.socket}"

    def ask(self, *args: str) -> str:
        done = self.run(["docker", *args], timeout_s=START_S)
        return done.checked(hint="`dalsegno demo --keep` keeps the cluster for inspection").stdout

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        command = [self.client, "--host", self.host, *argv[1:]]
        return self.inner.run(command, stdin=stdin, env=env, cwd=cwd, timeout_s=timeout_s)


@contextlib.contextmanager
def daemon(on_node: OnNode, folder: Path, group: str, cgroup: str) -> Iterator[Docker]:
    """Run the daemon on the node during the `with` block. Members of `group` may use it, which makes them root."""
    dockerd, client = find_programs()
    docker = Docker(client, folder / "docker.sock", LocalRunner())
    log = folder / "dockerd.log"
    command = [*ALONE, dockerd, *PLAIN, f"--host={docker.host}", f"--group={group}", f"--cgroup-parent={cgroup}"]
    mark = str(docker.socket)
    argv, env = on_node(command, {"PATH": os.environ.get("PATH", os.defpath), MARK: mark})
    child = start(argv, env, output=log)
    try:
        _wait_until_it_answers(docker, child, log)
        yield docker
    finally:
        _end_all(mark)
        child.close()


def _wait_until_it_answers(docker: Docker, child: Child, log: Path) -> None:
    until = time.monotonic() + START_S
    while docker.run(["docker", "version"], timeout_s=START_S).exit_code != 0:
        if not child.alive() or time.monotonic() > until:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise TargetError(
                f"Docker's daemon does not run on this machine: {' '.join(last) or 'no output'}",
                where=str(log),
                hint="it needs root, cgroups and its own mounts; `dalsegno demo --keep` keeps its log",
            )
        time.sleep(0.1)


def _end_all(mark: str) -> None:
    """End the daemon, its helpers and the processes in its containers, until none is left."""
    until = time.monotonic() + END_S
    while processes := marked(mark):
        below = {pid for process in processes for pid in descendants(process.pid)}
        descending = [Process(pid, ticks) for pid in below if (ticks := start_ticks(pid)) is not None]
        end([*processes, *descending], timeout_s=1.0)
        if time.monotonic() > until:
            raise TargetError("Docker's daemon does not exit", hint="`dalsegno down dalsegno-demo` stops its host")


# The image contains only this machine's `sleep` and its libraries.


NAME = "dalsegno-demo:sleep"


def give_to_docker(docker: Docker, folder: Path) -> str:
    """Import the image into Docker and return its name there."""
    path = folder / "sleep.tar"
    write_root(path, LocalRunner())
    docker.ask("import", str(path), NAME)
    return NAME


def take_from_docker(docker: Docker, folder: Path) -> Path:
    """Import the image from Docker, as `dalsegno image import dockerd://…` does, and return its .sqsh file."""
    path = folder / "sleep.sqsh"
    Importer(ImageStore(folder / "images"), runner=docker).to_file(parse_name(f"dockerd://{NAME}"), path)
    path.chmod(0o644)
    return path


def write_root(path: Path, runner: Runner) -> None:
    sleep = program("sleep") or "/bin/sleep"
    with tarfile.open(path, "w", dereference=True) as archive:
        archive.add(sleep, "bin/sleep")
        for library in parse_ldd(runner.run(["ldd", sleep]).stdout):
            archive.add(library, library.lstrip(os.sep))


def parse_ldd(text: str) -> list[str]:
    """Return the paths of the libraries; none for a static program."""
    return re.findall(r"(?:^|\s)(/\S+) \(0x", text)
