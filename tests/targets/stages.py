"""The targets of the contract suite: how each one is opened, how its emulator is made to fail, and what it lacks.

A stage is one target with an empty platform: an emulator of a cloud, this machine, or nothing but files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dalsegno.cluster import ClusterPlace
from dalsegno.errors import DalsegnoError
from dalsegno.spec.facts import Cluster
from dalsegno.spec.load import parse_spec
from dalsegno.spec.resolve import resolve
from dalsegno.system.processes import Completed, LocalRunner
from dalsegno.system.ssh import FakeHostRunner, HostCall, SshError, SshFault
from dalsegno.targets.base import (
    CanInject,
    CanNameUsers,
    CanReadLogs,
    CanReboot,
    CanReplace,
    CanReset,
    CanResize,
    CanSeeDaemons,
    CanSeePower,
    Plan,
    Target,
    require,
)
from dalsegno.targets.registry import open_existing, open_target
from dalsegno.targets.ssh.target import SshTarget
from tests.cluster.conftest import leftovers, make_home
from tests.targets.recorded import RecordedTarget


class Case(Enum):
    """The cases of the contract."""

    PLAN = "plan"
    APPLY = "apply"
    STATUS = "status"
    RESIZE = "resize"
    REPLACE = "replace"
    DOWN = "down"
    HALF_FAILED = "half-failed creation"
    GONE = "destroy of what is gone"
    CREDENTIALS = "wrong credentials"
    THROTTLED = "throttling"
    CAPACITY = "capacity refusal"


class PlatformFault(Enum):
    """The faults that an emulator can simulate."""

    CREATION = "a machine fails while it is set up"
    CAPACITY = "there is no machine of the wanted kind"
    CREDENTIALS = "the credentials are wrong"
    THROTTLED = "three requests are throttled"


class TargetStage:
    """One target, the folder of its cluster, and its platform."""

    name: str
    lacks: ClassVar[Mapping[Case, str]] = {}
    abilities: frozenset[type[Any]] = frozenset()
    is_cloud = False
    used_here = True  # Slurm and shells are used on this machine
    nodes: Sequence[str] = ("train-1", "train-2", "train-3")
    credentials_fix = ""  # a word of the hint about wrong credentials

    def __init__(self, home: Path) -> None:
        self.home = home
        self.place = ClusterPlace("one", home)

    def target(self) -> Target:
        """Return the target as another process would open it."""
        raise NotImplementedError

    def head(self) -> Target:
        """Return the side of the target that repairs nodes."""
        return self.target()

    def cluster(self, nodes: int = 2) -> Cluster:
        raise NotImplementedError

    def apply(self, plan: Plan) -> list[str]:
        """Carry out a plan and return the lines of progress."""
        said: list[str] = []
        with self.place.lock():
            self.target().apply(plan, said.append)
        return said

    def up(self, nodes: int = 2) -> list[str]:
        return self.apply(self.target().plan(self.cluster(nodes)))

    # Clouds only

    def fail(self, fault: PlatformFault) -> None:
        """Let the platform do something wrong."""
        raise NotImplementedError

    def repair(self) -> None:
        """Let the platform work again."""

    def vanish(self) -> None:
        """Remove the cluster on the platform, as somebody else could."""
        raise NotImplementedError

    def changes(self) -> int:
        """Return how many requests have changed the platform."""
        raise NotImplementedError

    def size(self) -> int:
        """Return how many compute nodes were requested from the platform."""
        raise NotImplementedError

    def exists(self) -> bool:
        """Return whether the platform holds anything of the cluster."""
        raise NotImplementedError

    def replace(self, node: str) -> None:
        """Replace a node, as the side that repairs nodes does."""
        require(self.head(), CanReplace).replace(node)

    def replaced(self) -> list[str]:
        """Return the nodes that the platform was asked to replace."""
        raise NotImplementedError


# ---- without a cloud

SPEC = """
name: one
target: local
partitions: [{{name: train, nodes: {nodes}, gpus: 2, gpu_type: h100, cpus: 2, memory: 1G, default: true}}]
slurm: {{accounting: false}}
containers: {{enabled: false}}
health: {{mode: observe}}  # nobody but the tests touches a node
local: {{hosts: {hosts}}}
"""
SSH_SPEC = """
name: one
target: ssh
ssh: {{user: ops, hosts: {{{hosts}}}}}
partitions: [{{name: train, nodes: {nodes}}}]
"""
_ON_HOSTS = "tests/ssh/test_ssh_cluster.py"
_NO_PLATFORM = {
    Case.CREDENTIALS: "no platform asks for credentials",
    Case.THROTTLED: "no platform throttles requests",
    Case.CAPACITY: "no platform refuses machines",
}


class RecordedStage(TargetStage):
    name = "recorded"
    abilities = frozenset({CanReboot, CanResize, CanSeePower})
    lacks: ClassVar[Mapping[Case, str]] = {
        Case.REPLACE: "it has no machines",
        Case.HALF_FAILED: "writing its files is one step",
        Case.GONE: "its folder is all there is",
        **_NO_PLATFORM,
    }

    def target(self) -> Target:
        return RecordedTarget(self.place.folder)

    def cluster(self, nodes: int = 2) -> Cluster:
        return local_cluster("auto", nodes)


class LocalStage(TargetStage):
    abilities = frozenset({
        CanReset, CanReboot, CanReplace, CanSeePower, CanReadLogs, CanInject, CanSeeDaemons, CanNameUsers,
    })  # fmt: skip
    lacks: ClassVar[Mapping[Case, str]] = {
        Case.HALF_FAILED: "tests/cluster/test_up_down.py::test_up_interrupted_at_any_step_is_finished_by_up",
        Case.GONE: "tests/cluster/test_up_down.py::test_down_finds_a_cluster_whose_folder_was_deleted",
        **_NO_PLATFORM,
    }

    def target(self) -> Target:
        folder = self.place.folder
        return open_existing(folder) if folder.exists() else open_target("local", folder)

    def cluster(self, nodes: int = 2) -> Cluster:
        return local_cluster(self.name, nodes)


class LoopbackStage(LocalStage):
    name = "loopback"


class VirtualStage(LocalStage):
    name = "virtual"


def local_cluster(hosts: str, nodes: int) -> Cluster:
    return resolve(parse_spec(SPEC.format(nodes=nodes, hosts=hosts), "cluster.yaml"))


class SshStage(TargetStage):
    """The ssh target with hosts that refuse every login. Its other cases need hosts with a real sshd."""

    name = "ssh"
    used_here = False
    lacks: ClassVar[Mapping[Case, str]] = {
        Case.PLAN: "tests/targets/test_ssh_plans.py::test_files_of_each_host",
        Case.APPLY: f"{_ON_HOSTS}::test_second_up_changes_nothing",
        Case.STATUS: f"{_ON_HOSTS}::test_status_of_the_operator_shows_all_daemons",
        Case.RESIZE: f"{_ON_HOSTS}::test_node_that_leaves_the_file_is_cleaned",
        Case.REPLACE: "a person replaces machines; tests/targets/test_ssh_sides.py has `HasMachines`",
        Case.DOWN: f"{_ON_HOSTS}::test_down_restores_every_host",
        Case.HALF_FAILED: f"{_ON_HOSTS}::test_connection_that_is_cut_half_way_is_continued_by_the_next_up",
        Case.GONE: f"{_ON_HOSTS}::test_unreachable_host_is_reported_and_repaired_by_the_next_up",
        Case.THROTTLED: "no platform throttles requests",
        Case.CAPACITY: "no platform refuses machines",
    }
    credentials_fix = "key"

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.hosts = FakeHostRunner(self._answer)

    def _answer(self, call: HostCall) -> DalsegnoError:
        return SshError(call.host, SshFault.LOGIN_REFUSED, "the login was refused", hint="check `ssh.key`")

    def target(self) -> Target:
        return SshTarget(self.place.folder, lambda access: contextlib.nullcontext(self.hosts))

    def cluster(self, nodes: int = 2) -> Cluster:
        names = ("head", *self.nodes[:nodes])
        hosts = ", ".join(f"{name}: 192.0.2.{number}" for number, name in enumerate(names, 10))
        return resolve(parse_spec(SSH_SPEC.format(nodes=nodes, hosts=hosts), "cluster.yaml"))

    def fail(self, fault: PlatformFault) -> None:
        assert fault is PlatformFault.CREDENTIALS, "the hosts never let anybody in"

    def changes(self) -> int:
        return sum(b'"mode": "apply"' in call.stdin for call in self.hosts.calls)


@contextmanager
def local_stage(kind: type[TargetStage]) -> Iterator[TargetStage]:
    """Yield a stage on this machine; afterwards, remove its cluster and check that nothing is left."""
    if kind is VirtualStage and os.geteuid() != 0:
        pytest.skip("virtual hosts need root")
    home = make_home("ds-")
    stage = kind(home)
    try:
        yield stage
    finally:
        stage.target().destroy(lambda text: None)
        left = leftovers(home)
        shutil.rmtree(home)
    assert left == []


# ---- Slurm on the head of an emulated cloud


class SlurmOnHead:
    """A runner that answers Slurm's commands for a head node, over ssh or on the head; other programs really run."""

    def __init__(self) -> None:
        self.nodes: Sequence[str] = ()
        self.partition = "train"
        self.silent = False
        self.commands: list[str] = []

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        if argv[0] not in ("ssh", "scontrol", "squeue"):
            return LocalRunner().run(argv, stdin=stdin, env=env, cwd=cwd, timeout_s=timeout_s)
        text = argv[-1] if argv[0] == "ssh" else " ".join(argv)
        self.commands.append(text)
        if self.silent:
            return Completed(tuple(argv), 255, "", "Connection timed out")
        return Completed(tuple(argv), 0, self._answer(text))

    def _answer(self, text: str) -> str:
        if "show node" in text:
            wanted = [name for name in self.nodes if text.endswith(f" {name}")] or self.nodes
            facts = f"State=IDLE CPUTot=8 RealMemory=1000 Partitions={self.partition}"
            return "".join(f"NodeName={name} {facts}\n" for name in wanted)
        if "show part" in text:
            return f"PartitionName={self.partition} Nodes={','.join(self.nodes)} State=UP\n"
        return ""

    def updates(self) -> list[str]:
        """Return the arguments after `scontrol update`."""
        return [text.partition("scontrol update ")[2] for text in self.commands if "scontrol update " in text]
