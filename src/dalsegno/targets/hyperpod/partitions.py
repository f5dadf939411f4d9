"""The service on HyperPod's controller that adds missing partitions to Slurm, and adds them again if they are lost.

HyperPod's agent writes slurm.conf. The agent sometimes leaves out a partition, so that the nodes of this partition are
only in HyperPod's own partition `dev`. It also drops lines that others appended. This service compares Slurm with the
cluster file twice a minute. It keeps the missing PartitionName lines in a marked block at the end of slurm.conf, and
changes nothing else in the file. If recovery may drain every node, the block also names the prolog that checks a node
before each job.

The service also applies the partition settings of the cluster file, even to partitions that HyperPod wrote. It creates
the reservations, the secrets of the node agents and the targets of Prometheus, because node names are known only here.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health.slurm_programs import may_act_on_all
from dalsegno.hostlist import compress, expand
from dalsegno.log import start_logging
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import NodeInfo
from dalsegno.slurm.render.commands import reservation_commands
from dalsegno.slurm.render.slurm_conf import partition_lines
from dalsegno.spec.facts import Cluster, Node, Partition
from dalsegno.system.files import read_text, write_atomic, write_if_changed
from dalsegno.system.processes import LocalRunner
from dalsegno.targets.cloud.agent_secrets import MUNGE_KEY, write_secrets
from dalsegno.targets.cloud.node_plans import PATH
from dalsegno.targets.cloud.slurm_policy import PartitionPolicy
from dalsegno.targets.folder import ClusterFolder, read_applied
from dalsegno.targets.hyperpod.answers import SlurmRole
from dalsegno.targets.hyperpod.lifecycle import RESOURCES
from dalsegno.targets.hyperpod.requests import planned_groups

log = logging.getLogger("partitions")

BEGIN, END = "# BEGIN partitions of Dal Segno", "# END partitions of Dal Segno"
CONF = "/opt/slurm/etc/slurm.conf"
EVERY_S = 30.0
# slurmd runs all files that match. `true` is on every system, so the glob matches before the node is set up, too.
PROLOGS = "/usr/bin/true*"
PROLOG = "/usr/bin/true.dalsegno-prolog"
_BLOCK = re.compile(rf"\n*{BEGIN}.*?\n.*?{END}\n?", re.DOTALL)
_NAME = re.compile(r"^\s*PartitionName\s*=\s*(\S+)", re.IGNORECASE)
_PROLOG = re.compile(r"^\s*Prolog\s*=", re.IGNORECASE | re.MULTILINE)
_SCHEDULER = re.compile(r"^\s*SchedulerParameters\s*=\s*(\S+)", re.IGNORECASE | re.MULTILINE)
_NODES = re.compile(r"\sNodes\s*=\s*(\S+)", re.IGNORECASE)


@dataclass(frozen=True)
class PartitionRepair:
    """The partitions that Slurm lacks or has without some of their nodes, and a slurm.conf with the missing ones."""

    conf: str  # the new text of slurm.conf
    added: tuple[str, ...] = ()  # partitions that slurm.conf lacks, even in our block
    lost: tuple[str, ...] = ()  # the subset of `added` that an earlier repair had already added
    incomplete: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # partition -> all nodes that it must have
    waiting: tuple[str, ...] = ()  # partitions whose nodes Slurm does not know yet


def read_groups(resource_config: str) -> dict[str, tuple[str, ...]]:
    """Return the nodes of each instance group by their names in Slurm, from HyperPod's resource_config.json."""
    try:
        groups = json.loads(resource_config)["InstanceGroups"]
        return {
            str(group["Name"]): tuple(
                f"ip-{str(each['CustomerIpAddress']).replace('.', '-')}"
                for each in group["Instances"]
                if each.get("CustomerIpAddress")
            )
            for group in groups
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DalsegnoError(
            f"HyperPod's list of instances cannot be read: {error!r}", hint=f"check {RESOURCES} on the controller"
        ) from None


def real_cluster(cluster: Cluster, groups: Mapping[str, Sequence[str]], known: Mapping[str, NodeInfo]) -> Cluster:
    """Return the cluster with the names and sizes that its nodes have in Slurm. Nodes that Slurm does not know, and
    reservations of such nodes, are left out."""
    names: dict[str, str] = {}
    for group in planned_groups(cluster):
        if group.role is SlurmRole.COMPUTE:
            planned = next(each for each in cluster.partitions if each.name == group.partition).nodes
            present = [name for name in groups.get(group.name, ()) if name in known]
            names |= dict(zip(planned, present, strict=False))
            # There can be more instances than in the file: HyperPod may still be removing some, or somebody has resized
            # the group.
            names |= {f"{group.name}/{at}": name for at, name in enumerate(present[len(planned) :])}
    nodes = tuple(
        Node(name, known[name].cpus, known[name].memory_mib, known[name].gpus, known[name].gpu_type)
        for name in dict.fromkeys(names.values())
    )
    partitions = tuple(
        replace(part, nodes=tuple(names[name] for name in part.nodes if name in names)) for part in cluster.partitions
    )
    reservations = tuple(
        replace(each, nodes=tuple(names[name] for name in each.nodes))
        for each in cluster.reservations
        if all(name in names for name in each.nodes)
    )
    return replace(cluster, nodes=nodes, partitions=partitions, reservations=reservations)


def plan_repair(
    conf: str, cluster: Cluster, present: Mapping[str, Sequence[str]], prologs: str = PROLOGS
) -> PartitionRepair:
    """Return the repair of slurm.conf. `cluster` has the nodes' names in Slurm. `present` has the nodes of each
    partition in Slurm."""
    own = _BLOCK.search(conf)
    theirs = _BLOCK.sub("\n", conf)
    defined = {found[1]: line for line in theirs.splitlines() if (found := _NAME.match(line))}
    ready = [part for part in cluster.partitions if part.nodes]
    missing = [part for part in ready if part.name not in defined]
    lines = _prolog_lines(theirs, cluster, prologs) + partition_lines(replace(cluster, partitions=tuple(missing)))
    text = f"{theirs.rstrip()}\n\n{BEGIN}: `dalsegno up` changes them\n{lines}{END}\n" if lines else theirs
    before = own[0] if own else ""
    in_block = {found[1] for line in before.splitlines() if (found := _NAME.match(line))}
    incomplete = {
        part.name: part.nodes
        for part in ready
        if part.name in defined and not _has_all(defined[part.name], present.get(part.name, ()), part)
    }
    return PartitionRepair(
        conf=text,
        added=tuple(part.name for part in missing if part.name not in in_block),
        incomplete=incomplete,
        waiting=tuple(part.name for part in cluster.partitions if not part.nodes),
    )


def _prolog_lines(theirs: str, cluster: Cluster, prologs: str) -> str:
    """Return the settings for the prolog; "" if it may not drain every node, or if slurm.conf has another prolog.

    By default, Slurm holds the job after a failed prolog until somebody releases it. A flag in SchedulerParameters
    prevents that. Slurm uses only the last such line, so ours repeats the flags of the line before.
    """
    if not (cluster.nodes and may_act_on_all(cluster)) or _PROLOG.search(theirs):
        return ""
    found = _SCHEDULER.findall(theirs)
    flags = [*(found[-1].split(",") if found else ()), "nohold_on_prolog_fail"]
    return f"Prolog={prologs}\nSchedulerParameters={','.join(dict.fromkeys(flags))}\n"


def _has_all(line: str, present: Sequence[str], partition: Partition) -> bool:
    found = _NODES.search(line)
    written = found[1] if found else ""
    if written.upper() == "ALL":
        return True
    try:
        named = set(expand(written)) if written else set()
    except ValueError:
        named = set()
    return set(partition.nodes) <= named | set(present)


@dataclass(frozen=True)
class ReservationChange:
    """The reservations to delete and to create, so that Slurm has those of the cluster file."""

    delete: tuple[str, ...]
    create: Mapping[str, tuple[str, ...]]  # name of a reservation -> the arguments of scontrol


def plan_reservations(
    cluster: Cluster, planned: Collection[str], made: Mapping[str, Sequence[str]], present: Collection[str]
) -> ReservationChange:
    """Return the changes from the reservations that this service created before to those of `cluster`.

    `cluster` has the nodes' names in Slurm. `planned` are the reservations of the cluster file, `made` the scontrol
    arguments used before, and `present` the reservations in Slurm, all by name. A reservation that has ended, or that a
    person has deleted, is created again only if it changes in the file.
    """
    wanted = {
        each.name: tuple(words) for each, words in zip(cluster.reservations, reservation_commands(cluster), strict=True)
    }
    create = {name: words for name, words in wanted.items() if tuple(made.get(name, ())) != words}
    gone = {name for name in made if name not in planned}
    return ReservationChange(tuple(sorted((gone | {*create} & {*made}) & {*present})), create)


class PartitionGuard:
    """The service that repairs the partitions of one cluster. `turn` may be called at any time."""

    def __init__(
        self,
        folder: Path,
        slurm: SlurmClient,
        conf: Path,
        resources: Path,
        secrets: Path | None = None,
        munge_key: Path = Path(MUNGE_KEY),
        prologs: str = PROLOGS,
    ) -> None:
        self.folder, self.slurm, self.conf, self.resources = ClusterFolder(folder), slurm, conf, resources
        self.secrets, self.munge_key, self.prologs = secrets, munge_key, prologs
        self._policy = PartitionPolicy(slurm, self.folder)
        self._added: set[str] = set()

    def turn(self) -> PartitionRepair | None:
        """Compare Slurm with the cluster file once, and repair the differences.

        Return the repair; None if the cluster does not exist yet.
        """
        cluster, conf = read_applied(self.folder), read_text(self.conf)
        resources = read_text(self.resources)
        if cluster is None or conf is None or resources is None:
            return None
        groups = read_groups(resources)
        known = {node.name: node for node in self.slurm.nodes()}
        present = {part.name: part.nodes for part in self.slurm.partition_settings()}
        real = real_cluster(cluster, groups, known)
        repair = plan_repair(conf, real, present, self.prologs)
        repair = replace(repair, lost=tuple(name for name in repair.added if name in self._added))
        self._carry_out(repair, conf)
        self._policy.turn(cluster.partitions)
        self._write_targets(real)
        self._write_secrets(real)
        self._reserve(real, [each.name for each in cluster.reservations])
        return repair

    def _reserve(self, real: Cluster, planned: Sequence[str]) -> None:
        record = self.folder.root / "reservations.json"
        made: dict[str, list[str]] = json.loads(read_text(record) or "{}")
        if not made and not planned:
            return
        change = plan_reservations(real, planned, made, [each.name for each in self.slurm.reservations()])
        for name in change.delete:
            self.slurm.scontrol("delete", f"ReservationName={name}")
            log.warning("reservation %s is deleted: the cluster file has another one, or none", name)
        for name, words in change.create.items():
            self.slurm.scontrol(*words)
            log.warning("reservation %s is created", name)
            made[name] = list(words)
            write_atomic(record, json.dumps(made, indent=1))  # written after each one, because the next may fail
        kept = {name: words for name, words in made.items() if name in planned}
        write_if_changed(record, json.dumps(kept, indent=1))

    def _carry_out(self, repair: PartitionRepair, conf: str) -> None:
        if repair.conf != conf:
            _write_like(self.conf, repair.conf)
            self.slurm.reconfigure()
        for name in repair.added:
            how = (
                "was lost again from slurm.conf, and is added again" if name in repair.lost else "was missing, is added"
            )
            log.warning("partition %s %s", name, how)
        self._added |= set(repair.added)
        for name, nodes in repair.incomplete.items():
            self.slurm.scontrol("update", f"PartitionName={name}", f"Nodes={compress(nodes)}")
            log.warning("partition %s lacked nodes; it has %s now", name, compress(nodes))

    def _write_targets(self, cluster: Cluster) -> None:
        """Write the addresses of all node_exporters for Prometheus, if Prometheus is set up."""
        from dalsegno.observe.monitor_layout import NODE_EXPORTER_PORT, partition_of

        folder = self.folder.root / "prometheus" / "targets"
        if not folder.is_dir():
            return
        partition = partition_of(cluster)
        found = [
            {
                "targets": [f"{node.name}:{NODE_EXPORTER_PORT}"],
                "labels": {"instance": node.name, "cluster": cluster.name, "partition": partition.get(node.name, "")},
            }
            for node in cluster.nodes
        ]
        write_if_changed(folder / "nodes.json", json.dumps(found, indent=1) + "\n")

    def _write_secrets(self, cluster: Cluster) -> None:
        """Write the secret of each node's agent. The secrets are written here, because HyperPod chooses a node's name
        only when the node starts."""
        if self.secrets is None:
            return
        write_secrets(self.secrets, self.munge_key, cluster.name, [node.name for node in cluster.nodes])


def _write_like(path: Path, text: str) -> None:
    """Replace a file that another program owns, and keep its owner and mode."""
    status = path.stat()
    write_atomic(path, text, status.st_mode & 0o777)
    os.chown(path, status.st_uid, status.st_gid)


def main(arguments: list[str], pause: Callable[[float], None] = time.sleep) -> int:
    """Run `hyperpod-partitions STATE-FOLDER [--secrets FOLDER] [--once]` and return the exit code."""
    start_logging("partitions")
    folder, *rest = arguments
    conf = Path(os.environ.get("SLURM_CONF", CONF))
    slurm = SlurmClient(LocalRunner(), {"PATH": os.environ.get("PATH", PATH), "SLURM_CONF": str(conf)}, timeout_s=30)
    resources = Path(os.environ.get("SAGEMAKER_RESOURCE_CONFIG_PATH", RESOURCES))
    shared = Path(rest[rest.index("--secrets") + 1]) if "--secrets" in rest else None
    guard = PartitionGuard(Path(folder), slurm, conf, resources, shared)
    while True:
        try:
            guard.turn()
        except (DalsegnoError, OSError) as error:  # Slurm is restarting, or HyperPod is writing its file
            log.warning("%s", error)
        if "--once" in rest:
            return 0
        pause(EVERY_S)
