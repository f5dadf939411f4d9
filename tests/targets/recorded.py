"""A target that keeps a cluster as files only and records what it was asked to do: the contract without machines."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dalsegno.errors import NotThere, TargetError
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster
from dalsegno.system.processes import FakeRunner
from dalsegno.targets.base import (
    ClusterPhase,
    ClusterStatus,
    ClusterSummary,
    DaemonLog,
    NodeStatus,
    NodeTimes,
    Plan,
    Removal,
    RootUse,
    Say,
    ShellEntry,
)
from dalsegno.targets.folder import ClusterFolder, read_applied, write_applied


@dataclass(frozen=True)
class RecordedPlan:
    cluster: Cluster
    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    only_user: str = ""
    import_images: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.add or self.remove)

    def sentences(self) -> list[str]:
        lines = [(self.add, f"adds {', '.join(self.add)}"), (self.remove, f"removes {', '.join(self.remove)}")]
        return [line for condition, line in lines if condition] or ["nothing to do"]

    def details(self) -> list[str]:
        return []


@dataclass
class RecordedTarget:
    """A target that can reboot nodes, see their power and resize partitions, and nothing else."""

    root: Path
    done: list[tuple[str, str]] = field(default_factory=list)
    slurm: SlurmClient = field(default_factory=lambda: SlurmClient(FakeRunner(lambda argv, stdin: ""), {}))

    @property
    def kind(self) -> str:
        return "recorded"

    @property
    def folder(self) -> ClusterFolder:
        return ClusterFolder(self.root)

    def root_use(self, cluster: Cluster) -> RootUse | None:
        return None

    def plan(self, cluster: Cluster) -> RecordedPlan:
        before, after = self._nodes(), [node.name for node in cluster.nodes]
        add, remove = (tuple(name for name in a if name not in b) for a, b in ((after, before), (before, after)))
        return RecordedPlan(cluster, add, remove)

    def apply(self, plan: Plan, say: Say) -> None:
        if not isinstance(plan, RecordedPlan):
            raise TypeError(f"not a plan of this target: {plan!r}")
        self.root.mkdir(parents=True, exist_ok=True)
        self.folder.state.write_text(json.dumps({"target": self.kind}))
        for word, names in (("add", plan.add), ("remove", plan.remove)):
            for name in names:
                say(f"{word} {name}")
                self.done.append((word, name))
        write_applied(self.folder, plan.cluster)

    def import_images(self, plan: Plan, say: Say) -> None:
        self.done += [("import", image) for image in plan.import_images]

    def removal(self) -> Removal:
        return Removal()

    def destroy(self, say: Say) -> bool:
        there = self.root.exists()
        shutil.rmtree(self.root, ignore_errors=True)
        return there

    def status(self) -> ClusterStatus:
        nodes = tuple(NodeStatus(name, "idle") for name in self._nodes())
        return ClusterStatus(self.folder.name, self.kind, self._phase(), nodes)

    def summary(self) -> ClusterSummary:
        return ClusterSummary(self.kind, self._phase(), len(self._nodes()))

    def daemon_logs(self) -> list[DaemonLog]:
        return [DaemonLog(name, "slurmd", self.root / f"{name}.log") for name in self._nodes()]

    def owner(self) -> int | None:
        return self.root.stat().st_uid if self.root.exists() else None

    def slurm_as(self, user: str) -> SlurmClient:
        return self.slurm

    def slurm_runs(self) -> bool:
        return self._phase() is ClusterPhase.UP

    @property
    def controller_socket(self) -> Path:
        return self.folder.controller_socket

    def user_env(self, env: Mapping[str, str]) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder.slurm_conf), "DALSEGNO_CLUSTER": self.folder.name}

    def shell(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        *,
        host: str | None = None,
        user: str | None = None,
    ) -> ShellEntry:
        return ShellEntry(list(command), {**env, **self.user_env(env)}, os.geteuid() if user else None)

    def on_node(self, node: str, command: Sequence[str], env: Mapping[str, str], cwd: str) -> ShellEntry:
        self._check(node)
        entry = self.shell(command, env, cwd)
        return replace(entry, env={**entry.env, "SLURMD_NODENAME": node})

    def job_images(self) -> str:
        return ""

    @property
    def node_times(self) -> NodeTimes:
        return NodeTimes(boot_s=1.0, gone_s=1.0)

    def reboot(self, node: str) -> None:
        self._check(node)
        self.done.append(("reboot", node))

    def is_off(self, node: str) -> bool:
        return False

    def resize(self, partition: str, nodes: int) -> None:
        if nodes < 1:
            raise TargetError(f"partition {partition} needs at least one node", hint="ask for 1 or more")
        self.done.append(("resize", f"{partition} {nodes}"))

    def _check(self, node: str) -> None:
        if node not in self._nodes():
            raise NotThere(f"there is no node `{node}`", hint=f"nodes: {', '.join(self._nodes())}")

    def _nodes(self) -> list[str]:
        applied = read_applied(self.folder)
        return [node.name for node in applied.nodes] if applied else []

    def _phase(self) -> ClusterPhase:
        return ClusterPhase.UP if self.root.exists() else ClusterPhase.GONE
