"""The two sides of a cluster that is used on its head node: the operator's machine and the head.

The operator's machine creates and changes the cluster. Slurm, the controller and users work on the head. The targets
`ssh`, `parallelcluster`, `hyperpod` and `oci` derive their classes from `OperatorSide` and `HeadSide`.
"""

from __future__ import annotations

import os
import pwd
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from dalsegno.errors import DalsegnoError, NotThere, TargetError
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobInfo, NodeInfo
from dalsegno.spec.facts import Cluster, Node
from dalsegno.system.processes import Completed, LocalRunner, Runner
from dalsegno.targets.base import (
    ClusterPhase,
    ClusterStatus,
    ClusterSummary,
    DaemonLog,
    JobStatus,
    NodeStatus,
    NodeTimes,
    Plan,
    Removal,
    RootUse,
    Say,
    ShellEntry,
    job_status,
)
from dalsegno.targets.folder import LOGS, ClusterFolder, read_applied

COMMAND = "/usr/local/bin/dalsegno"  # path of the command on the head
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ANSWER_S = 60.0
IMPORT_S = 3600.0  # time limit for the import of one image, which may be tens of GB
State = TypeVar("State")
Execute = Callable[[Sequence[str]], Completed]


def homes_on_machines(applied: Cluster | None, login: str) -> tuple[str, ...]:
    """Return the users whose home folders are on disks of the machines, and are deleted with them.

    There are none if the home folders are on storage of the cluster file.
    """
    if applied is None or any(each.home or each.mount == "/home" for each in applied.storage):
        return ()
    return tuple(dict.fromkeys([login, *(user.name for user in applied.users)]))


def named_sources(applied: Cluster | None) -> tuple[str, ...]:
    """Return the storage that has a `source` in the cluster file. It existed before the cluster, so `down` keeps it."""
    return tuple(f"storage {each.name} ({each.source})" for each in applied.storage if each.source) if applied else ()


class ClusterSide:
    """The part that both sides have in common: a state folder, and no need for root on this machine."""

    folder: ClusterFolder
    times: NodeTimes

    @property
    def kind(self) -> str:
        """The name of the target in cluster files."""
        raise NotImplementedError

    def recorded_phase(self, applied: Cluster | None) -> ClusterPhase:
        """Return the phase that this machine knows without a request to a platform or a command of Slurm.

        Raise an error if the state file is damaged.
        """
        raise NotImplementedError

    def root_use(self, cluster: Cluster) -> RootUse | None:
        return None

    def summary(self) -> ClusterSummary:
        try:
            applied = read_applied(self.folder)
            phase = self.recorded_phase(applied)
        except DalsegnoError:
            return ClusterSummary(self.kind, ClusterPhase.DAMAGED, 0)
        return ClusterSummary(self.kind, phase, len(applied.nodes) if applied else 0)

    def owner(self) -> int | None:
        try:
            return self.folder.root.stat().st_uid
        except OSError:
            return None

    @property
    def controller_socket(self) -> Path:
        return self.folder.controller_socket  # only the head has it, because the controller runs there

    def job_images(self) -> str:
        return ""

    @property
    def node_times(self) -> NodeTimes:
        return self.times


class OperatorSide(ClusterSide):
    """The side of the operator's machine, where `dalsegno up` is run. Slurm and the logs are on other machines."""

    @property
    def slurm(self) -> SlurmClient:
        raise NotImplementedError

    def import_images(self, plan: Plan, say: Say) -> None:
        """Do nothing, because images are imported on the cluster."""

    def daemon_logs(self) -> list[DaemonLog]:
        return []

    def user_env(self, env: Mapping[str, str]) -> dict[str, str]:
        raise TargetError(
            f"{self.folder.name} is on other machines; its Slurm cannot be used from this shell",
            hint="`dalsegno shell` opens a shell on its login or head node",
        )

    def unfinished_jobs(self) -> tuple[JobInfo, ...]:
        """Return the jobs that `down` would end; none if Slurm does not answer."""
        try:
            return tuple(job for job in self.slurm.jobs() if not job.state.ended)
        except DalsegnoError:
            return ()

    def shell(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        *,
        host: str | None = None,
        user: str | None = None,
    ) -> ShellEntry:
        raise NotImplementedError

    def on_node(self, node: str, command: Sequence[str], env: Mapping[str, str], cwd: str) -> ShellEntry:
        return self.shell(["sudo", "--", *command], env, cwd, host=node)

    def forward(self, arguments: Sequence[str], *, root: bool = False) -> ShellEntry | None:
        """Return how to run `dalsegno ARGUMENTS` on the head, as root or as the login user."""
        sudo = ["sudo", "--"] if root else []
        return self.on_head([*sudo, COMMAND, *arguments])

    def on_head(self, command: Sequence[str]) -> ShellEntry:
        """Return how to run a command on the head as the login user."""
        return self.shell(command, dict(os.environ), "/", host="head")


class HeadSide(ClusterSide):
    """The side of the head. There, `up` and `down` refuse, because the cluster is changed only from the operator's
    machine."""

    slurmctld_port = 6817
    slurm_bin = ""  # folder of Slurm's commands; "" if they are in PATH

    def __init__(self, folder: Path, runner: Runner | None = None) -> None:
        self.folder = ClusterFolder(folder)
        self.runner = runner or LocalRunner()
        self.slurm = self.slurm_client()

    # Methods that only the operator's machine supports
    def plan(self, cluster: Cluster) -> Plan:
        self.refuse("changed")

    def apply(self, plan: Plan, say: Say) -> None:
        self.refuse("changed")

    def import_images(self, plan: Plan, say: Say) -> None:
        self.refuse("changed")

    def removal(self) -> Removal:
        self.refuse("removed")

    def destroy(self, say: Say) -> bool:
        self.refuse("removed")

    def refuse(self, what: str) -> NoReturn:
        operator = self.operator()
        raise TargetError(
            f"{self.folder.name} was created from another machine{f' by {operator}' if operator else ''}, "
            f"and is {what} from there",
            hint="run the command on the machine where you ran `dalsegno up`",
        )

    def operator(self) -> str:
        """Return the user and machine that created the cluster; "" if unknown."""
        return ""

    # Reporting the cluster's state
    def recorded_phase(self, applied: Cluster | None) -> ClusterPhase:
        return ClusterPhase.UP if self.slurm_runs() else ClusterPhase.STOPPED

    def status(self) -> ClusterStatus:
        """Return the status from Slurm. Only the operator's machine calls the platform's API."""
        seen = ask_slurm(self.slurm_client(timeout_s=5.0)) if self.slurm_runs() else SlurmView(problem=NO_SLURMCTLD)
        phase = ClusterPhase.DEGRADED if seen.problem else ClusterPhase.UP
        nodes = tuple(node_status(node) for node in seen.nodes)
        return ClusterStatus(self.folder.name, self.kind, phase, nodes, (), seen.jobs, seen.problems)

    def daemon_logs(self) -> list[DaemonLog]:
        return [DaemonLog(self.host_name(), path.stem, path) for path in sorted(Path(LOGS).glob("*.log"))]

    def host_name(self) -> str:
        return socket.gethostname()

    def job_images(self) -> str:
        applied = read_applied(self.folder)
        return applied.containers.folder if applied and applied.containers.enabled else ""

    # Slurm and shells
    def slurm_client(self, prefix: Sequence[str] = (), timeout_s: float = 30) -> SlurmClient:
        env = {"PATH": self._path(PATH), "SLURM_CONF": str(self.folder.slurm_conf)}
        return SlurmClient(self.runner, env, prefix=prefix, timeout_s=timeout_s)

    def _path(self, rest: str) -> str:
        return f"{self.slurm_bin}:{rest}" if self.slurm_bin else rest

    def slurm_as(self, user: str) -> SlurmClient:
        return self.slurm_client(["runuser", "-u", user, "--"])

    def slurm_runs(self) -> bool:
        try:
            with socket.create_connection((self.slurmctld_address(), self.slurmctld_port), timeout=1.0):
                return True
        except OSError:
            return False

    def slurmctld_address(self) -> str:
        return socket.gethostname()

    def user_env(self, env: Mapping[str, str]) -> dict[str, str]:
        return {
            **({"PATH": self._path(env.get("PATH", PATH))} if self.slurm_bin else {}),
            "SLURM_CONF": str(self.folder.slurm_conf),
            "DALSEGNO_CLUSTER": self.folder.name,
            "DALSEGNO_CONTROLLER": str(self.folder.controller_socket),
        }

    def shell(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        *,
        host: str | None = None,
        user: str | None = None,
    ) -> ShellEntry:
        if host:
            return ShellEntry(self.ssh_to(host, command, terminal=not command), dict(env))
        if user:
            return self._shell_as(user, command, env)
        return ShellEntry(list(command) or [env.get("SHELL") or "/bin/bash"], {**env, **self.user_env(env)})

    def _shell_as(self, user: str, command: Sequence[str], env: Mapping[str, str]) -> ShellEntry:
        """Return a shell of another user. The shell gets a terminal of its own, and of the caller's environment only
        the terminal type, the locale and the time zone."""
        try:
            person = pwd.getpwnam(user)
        except KeyError:
            raise NotThere(f"there is no user `{user}` on this machine", hint="`getent passwd` lists users") from None
        kept = {name: value for name, value in env.items() if name in ("TERM", "LANG", "TZ") or name.startswith("LC_")}
        own = {"PATH": PATH, "USER": user, "LOGNAME": user, "HOME": person.pw_dir, "SHELL": person.pw_shell}
        argv = ["runuser", "-u", user, "--", *(command or [person.pw_shell or "/bin/sh"])]
        return ShellEntry(argv, {**kept, **own, **self.user_env({"PATH": PATH})}, person.pw_uid)

    def on_node(self, node: str, command: Sequence[str], env: Mapping[str, str], cwd: str) -> ShellEntry:
        return ShellEntry(self.ssh_to(node, command, terminal=False), dict(env))

    def ssh_to(self, host: str, command: Sequence[str], *, terminal: bool) -> list[str]:
        # All machines share the login user's home folder, which contains the SSH key for this.
        return ["ssh", "--", host, *([shlex.join(command)] if command else [])]


class MonitoredHead(HeadSide):
    """A head on which Prometheus can be queried. It can be switched on and off only from the operator's machine."""

    def switch_monitor(self, on: bool) -> Plan:
        self.refuse("changed")

    def has_monitor(self) -> bool:
        applied = read_applied(self.folder)
        return applied is not None and applied.monitoring.prometheus


# Queries to Slurm, from the operator's machine or from the head

NO_SLURMCTLD = "slurmctld does not run"


class CommandsOnHead:
    """Runs commands on the head. The commands do not get the environment of this machine.

    `enter` returns the command line that runs a command on the head.
    """

    def __init__(
        self, runner: Runner, enter: Callable[[Sequence[str]], Sequence[str]], env: Mapping[str, str] | None = None
    ) -> None:
        self._runner, self._enter, self._env = runner, enter, env

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        words = ["env", *(f"{name}={value}" for name, value in (env or {}).items()), *argv]
        return self._runner.run(self._enter(words), stdin=stdin, env=self._env, timeout_s=timeout_s or ANSWER_S)


@dataclass(frozen=True)
class SlurmView:
    """The answers of slurmctld, or the reason why there are none. `jobs` is None if the jobs are unknown."""

    nodes: Sequence[NodeInfo] = ()
    jobs: tuple[JobStatus, ...] | None = None
    problem: str = ""

    @property
    def problems(self) -> tuple[str, ...]:
        return (self.problem,) if self.problem else ()


def ask_slurm(slurm: SlurmClient | None) -> SlurmView:
    """Return the nodes and jobs. If slurmctld does not answer, add a problem. If `slurm` is None, do not ask."""
    if slurm is None:
        return SlurmView()
    try:
        return SlurmView(slurm.nodes(), tuple(job_status(job) for job in slurm.queue().jobs))
    except DalsegnoError as error:
        return SlurmView(problem=f"slurmctld does not answer: {error.what.splitlines()[-1].strip()}")


def node_rows(
    applied: Cluster | None, seen: Sequence[NodeInfo], addresses: Mapping[str, str] | None = None
) -> tuple[NodeStatus, ...]:
    """Return the nodes of the cluster file, then those that only Slurm knows.

    A node that Slurm does not know is `unknown`.
    """
    known: dict[str, Node] = {node.name: node for node in applied.nodes} if applied else {}
    info = {node.name: node for node in seen}
    return tuple(
        _node_row(name, known.get(name), info.get(name), applied, addresses or {})
        for name in dict.fromkeys([*known, *info])
    )


def _node_row(
    name: str, fact: Node | None, info: NodeInfo | None, applied: Cluster | None, addresses: Mapping[str, str]
) -> NodeStatus:
    return NodeStatus(
        name,
        state=info.word if info else "unknown",
        reason=info.reason if info else "",
        reason_user=info.reason_user if info else "",
        partitions=tuple(part.name for part in applied.partitions if name in part.nodes) if applied else (),
        gpus=info.gpus if info else fact.gpus if fact else 0,
        gpus_used=info.gpus_used if info else None,
        gpu_type=fact.gpu_type if fact else "",
        address=addresses.get(name, ""),
        spare=fact.spare if fact else False,
    )


def node_status(node: NodeInfo) -> NodeStatus:
    """Return the status of a node as Slurm reports it."""
    return NodeStatus(
        node.name, node.word, node.reason, node.partitions, node.gpus, node.gpus_used, node.gpu_type, node.address,
        reason_user=node.reason_user,
    )  # fmt: skip


# Functions for the operator's machine


def known(state: State | None, folder: ClusterFolder) -> State:
    """Return the state. Raise NotThere if there is none."""
    if state is None:
        raise NotThere(f"there is no cluster `{folder.name}`", hint="`dalsegno up` creates it")
    return state


def applied_cluster(folder: ClusterFolder) -> Cluster:
    """Return the cluster of the last complete `up`. Raise NotThere if no `up` was completed."""
    applied = read_applied(folder)
    if applied is None:
        raise NotThere(f"there is no complete cluster {folder.name}", hint="`dalsegno up` creates it")
    return applied


def import_on_head(cluster: Cluster, images: Sequence[str], execute: Execute, say: Say) -> None:
    """Import images into the folder that all machines see, and report all failures together at the end.

    `execute` runs a command on the head as root.
    """
    failed = []
    for image in images:
        say(f"importing {image} on the head")
        store = f"DALSEGNO_IMAGES={cluster.containers.folder}"
        done = execute(["env", store, COMMAND, "image", "import", "--or-kept", "--quiet", image])
        if done.exit_code != 0:
            failed.append(f"{image}: {(done.stderr.strip() or 'no output').splitlines()[0]}")
    if failed:
        lines = "".join(f"\n  {each}" for each in failed)
        hint = "the head must reach the registry; `up` does not try again: run `dalsegno image import` on the head"
        raise TargetError(f"{cluster.name} is up, but images were not imported:{lines}", hint=hint)


def as_user(command: Sequence[str], user: str | None) -> list[str]:
    """Return the command wrapped in sudo and runuser, so that it runs as `user`; without a user, return it unchanged.

    An empty command becomes a login shell of the user.
    """
    return ["sudo", "runuser", "-u", user, "--", *(command or ["/bin/bash", "-l"])] if user else list(command)


def at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
