"""A job is cancelled: its program lives on if Docker started it, and is gone if it ran in a container of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.demo.waiting import until
from dalsegno.errors import TargetError
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.states import NodeState

PROGRAM = "sleep 1000"
TOPS = ("slurmstepd", "slurmd", "dockerd", "containerd")  # whose child a program is said to be
WAIT_S = 90.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Process:
    """A line of `ps` on the node."""

    pid: int
    parent: int
    user: str
    name: str
    words: str


@dataclass(frozen=True)
class Sight:
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
    sight: Sight
    lives_on: bool


@dataclass(frozen=True)
class Stage:
    """One node, and whoever hands the jobs in. `ask` is answered on the node, as root."""

    slurm: SlurmClient
    researcher: SlurmClient
    node: str
    ask: Callable[[Sequence[str]], str]
    output: Path  # of the jobs


def play(stage: Stage, command: str, say: Say, export: str = "") -> Ending:
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


def _started(stage: Stage, job: int, before: set[int]) -> int:
    new = [process.pid for process in find(stage) if process.pid not in before]
    if not new and stage.slurm.job(job).state.ended:
        said = stage.output.read_text(errors="replace").strip() if stage.output.exists() else ""
        raise TargetError(
            f"job {job} ended before its program began: {said or 'it said nothing'}",
            hint="`dalsegno demo --keep` leaves the cluster up to look at",
        )
    return new[0] if new else 0


def _is_idle(stage: Stage) -> bool:
    """Slurm has killed what it knows of: a node is idle already while it does, but COMPLETING too."""
    node = stage.slurm.node(stage.node)
    return node.state is NodeState.IDLE and not node.flags


def find(stage: Stage) -> list[Process]:
    """Slurm writes a program with its folder, Docker without."""
    name = PROGRAM.split()[0]
    return [each for each in processes(stage) if each.name == name and each.words.endswith(PROGRAM)]


def look(stage: Stage, job: int, pid: int) -> Sight:
    known = {process.pid: process for process in processes(stage)}
    counted = stage.ask(["scontrol", "listpids", str(job), stage.node])
    return Sight(
        pid,
        known[pid].user,
        ancestors(known, pid),
        parse_cgroup(stage.ask(["cat", f"/proc/{pid}/cgroup"])),
        parse_variable(stage.ask(["cat", f"/proc/{pid}/environ"]), "CUDA_VISIBLE_DEVICES"),
        str(pid) in [line.split()[0] for line in counted.splitlines() if line.strip()],
    )


def processes(stage: Stage) -> list[Process]:
    return parse_ps(stage.ask(["ps", "-eo", "pid=,ppid=,user:16=,comm=,args="]))


def parse_ps(text: str) -> list[Process]:
    found = []
    for line in text.splitlines():
        pid, parent, user, name, words = [*line.split(None, 4), "", "", "", "", ""][:5]
        if pid.isdigit() and parent.isdigit():
            found.append(Process(int(pid), int(parent), user, name, words))
    return found


def ancestors(known: dict[int, Process], pid: int) -> tuple[str, ...]:
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
