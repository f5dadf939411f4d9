"""A job is cancelled: its program lives on if Docker started it, and is gone if it ran in a container of ours."""

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
TOPS = ("slurmstepd", "slurmd", "dockerd", "containerd")  # whose child a program is said to be
WAIT_S = 90.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class NodeProcess:
    """A line of `ps` on the node."""

    pid: int
    parent: int
    user: str
    name: str
    words: str


@dataclass(frozen=True)
class ProgramSight:
    """What is to be seen of a program while its job runs."""

    pid: int
    user: str
    ancestors: tuple[str, ...]  # the nearest last
    cgroup: str
    gpu: str
    counted: bool  # by Slurm, as one of the job's


@dataclass(frozen=True)
class Ending:
    """One job: what it was, what was seen of its program, and whether that was there still when the job was over."""

    job: int
    command: str
    sight: ProgramSight
    lives_on: bool


@dataclass(frozen=True)
class DockerStage:
    """One node, and whoever hands the jobs in. `ask` is answered on the node, as root."""

    slurm: SlurmClient
    researcher: SlurmClient
    node: str
    ask: Callable[[Sequence[str]], str]
    output: Path  # of the jobs


def play(stage: DockerStage, command: str, say: Say, export: str = "") -> Ending:
    """Hand a job in, look at its program, cancel the job, and look again once Slurm has nothing on the node."""
    before = {process.pid for process in find(stage)}
    words = ["--gpus=1", f"--output={stage.output}", f"--export=ALL{export and ','}{export}", f"--wrap={command}"]
    job = stage.researcher.submit(args=words)
    say(f"job {job}: {command}")
    pid = until(lambda: _started(stage, job, before), WAIT_S, f"`{PROGRAM}` of job {job} on {stage.node}")
    sight = look(stage, job, pid)
    say(f"it runs as process {pid} of {stage.node}; now: scancel {job}")
    stage.slurm.cancel(job)
    until(lambda: _is_idle(stage), WAIT_S, f"{stage.node} to be idle again")
    lives_on = any(process.pid == pid for process in find(stage))
    say(f"job {job} is over, and {stage.node} is idle; its program {'is still there' if lives_on else 'is gone'}")
    return Ending(job, command, sight, lives_on)


def _started(stage: DockerStage, job: int, before: set[int]) -> int:
    new = [process.pid for process in find(stage) if process.pid not in before]
    if not new and stage.slurm.job(job).state.ended:
        said = stage.output.read_text(errors="replace").strip() if stage.output.exists() else ""
        raise TargetError(
            f"job {job} ended before its program began: {said or 'it said nothing'}",
            hint="`dalsegno demo --keep` leaves the cluster up to look at",
        )
    return new[0] if new else 0


def _is_idle(stage: DockerStage) -> bool:
    """Slurm has killed what it knows of: a node is idle already while it does, but COMPLETING too."""
    node = stage.slurm.node(stage.node)
    return node.state is NodeState.IDLE and not node.flags


def find(stage: DockerStage) -> list[NodeProcess]:
    """Slurm writes a program with its folder, Docker without."""
    name = PROGRAM.split()[0]
    return [each for each in processes(stage) if each.name == name and each.words.endswith(PROGRAM)]


def look(stage: DockerStage, job: int, pid: int) -> ProgramSight:
    known = {process.pid: process for process in processes(stage)}
    counted = stage.ask(["scontrol", "listpids", str(job), stage.node])
    return ProgramSight(
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
        pid, parent, user, name, words = [*line.split(None, 4), "", "", "", "", ""][:5]
        if pid.isdigit() and parent.isdigit():
            found.append(NodeProcess(int(pid), int(parent), user, name, words))
    return found


def ancestors(known: dict[int, NodeProcess], pid: int) -> tuple[str, ...]:
    """Up to the first that is a service of the node's, or to the node's first process."""
    names: list[str] = []
    while (process := known.get(known[pid].parent)) is not None:
        names.insert(0, "init" if process.pid == 1 else process.name)
        if process.name in TOPS:
            break
        pid = process.pid
    return tuple(names)


def parse_cgroup(text: str) -> str:
    """Where Slurm looks for a job's processes: in the freezer's hierarchy, or in the only one."""
    groups = {kind: path for line in text.splitlines() for _, kind, path in [line.split(":", 2)]}
    return groups.get("freezer") or groups.get("", "")


def parse_variable(environ: str, name: str) -> str:
    return dict(each.partition("=")[::2] for each in environ.split("\0")).get(name, "")


# ---- Docker's daemon on one node for as long as a scene is played, with nothing of it outside its own namespace.


START_S = 60.0
END_S = 20.0
# Images, sockets, pid files and the key that it writes to /etc are in memory, and seen by the daemon alone: they go
# with it.
PRIVATE = """mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/etc /run/work &&
    mount -t overlay -o lowerdir=/etc,upperdir=/run/etc,workdir=/run/work overlay /etc && exec "$@"
"""
ALONE = ("unshare", "--mount", "--", "/bin/sh", "-c", PRIVATE, "sh")
# A small root file system and no network of its own: nothing of the machine's is changed.
PLAIN = (
    "--data-root=/run/data", "--exec-root=/run/docker", "--pidfile=/run/docker.pid", "--storage-driver=vfs",
    "--exec-opt=native.cgroupdriver=cgroupfs", "--default-cgroupns-mode=private", "--bridge=none",
    "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false",
)  # fmt: skip

OnNode = Callable[[Sequence[str], Mapping[str, str]], tuple[list[str], dict[str, str]]]


def find_programs() -> tuple[str, str]:
    """The daemon, and the client that came with it."""
    daemon = program("dockerd")
    if daemon is None:
        raise NotThere(
            "there is no Docker on this machine to compare with",
            hint="`./dalsegno demo --scene docker` from a clone installs it, or: "
            "sudo apt-get install --no-install-recommends docker.io",
        )
    beside = os.pathsep.join([os.path.dirname(daemon), "/usr/bin"])
    return daemon, shutil.which("docker", path=beside) or program("docker") or "docker"


@dataclass(frozen=True)
class Docker:
    """A client of the daemon, from anywhere on the machine. As a Runner it is the `docker` of an import."""

    client: str
    socket: Path
    inner: Runner

    @property
    def host(self) -> str:
        return f"unix://{self.socket}"

    def ask(self, *args: str) -> str:
        done = self.run(["docker", *args], timeout_s=START_S)
        return done.checked(hint="`dalsegno demo --keep` leaves the cluster up to look at").stdout

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        words = [self.client, "--host", self.host, *argv[1:]]
        return self.inner.run(words, stdin=stdin, env=env, cwd=cwd, timeout_s=timeout_s)


@contextlib.contextmanager
def daemon(on_node: OnNode, folder: Path, group: str, cgroup: str) -> Iterator[Docker]:
    """Runs on the node while the block does. `group` may speak to it, which is as much as to be root there."""
    dockerd, client = find_programs()
    docker = Docker(client, folder / "docker.sock", LocalRunner())
    log = folder / "dockerd.log"
    words = [*ALONE, dockerd, *PLAIN, f"--host={docker.host}", f"--group={group}", f"--cgroup-parent={cgroup}"]
    mark = str(docker.socket)
    argv, env = on_node(words, {"PATH": os.environ.get("PATH", os.defpath), MARK: mark})
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
                f"Docker's daemon does not run on this machine: {' '.join(last) or 'it said nothing'}",
                where=str(log),
                hint="it needs root, cgroups and mounts of its own; `dalsegno demo --keep` leaves its log to read",
            )
        time.sleep(0.1)


def _end_all(mark: str) -> None:
    """The daemon, its helpers, and what they have started in containers: until nothing of it is left."""
    until = time.monotonic() + END_S
    while processes := marked(mark):
        below = {pid for process in processes for pid in descendants(process.pid)}
        below_it = [Process(pid, ticks) for pid in below if (ticks := start_ticks(pid)) is not None]
        end([*processes, *below_it], timeout_s=1.0)
        if time.monotonic() > until:
            raise TargetError("Docker's daemon does not end", hint="`dalsegno down dalsegno-demo` ends its host")


# ---- The smallest image that sleeps: one program of this machine's, and the libraries it wants.


NAME = "dalsegno-demo:sleep"


def give_to_docker(docker: Docker, folder: Path) -> str:
    """Its name there."""
    path = folder / "sleep.tar"
    write_root(path, LocalRunner())
    docker.ask("import", str(path), NAME)
    return NAME


def take_from_docker(docker: Docker, folder: Path) -> Path:
    """The same image as a .sqsh, as `dalsegno image import dockerd://…` makes it."""
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
    """Where the libraries are; a program that stands alone has none."""
    return re.findall(r"(?:^|\s)(/\S+) \(0x", text)
