"""The plan of a cluster on ssh hosts: what changes on each host, and which hosts cannot be changed. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.setup.delivery import ChangeAction, ChangeKind, CodeBundle, MachineChange
from dalsegno.setup.inspect import HostFacts, InspectedDisk
from dalsegno.setup.node_plan import NodePlan
from dalsegno.spec.facts import Cluster
from dalsegno.spec.values import is_node_name
from dalsegno.targets.base import counted, named
from dalsegno.targets.ssh.desired import ETC, sized_node
from dalsegno.targets.ssh.directory import DirectorySecrets
from dalsegno.targets.ssh.folder import ClusterSecrets
from dalsegno.targets.ssh.people import AssignedIds
from dalsegno.targets.ssh.programs import uses_pyxis
from dalsegno.targets.ssh.releases import DEBIAN, check_system, kinds_of, slurm_version
from dalsegno.targets.ssh.storage import NFS_SERVER

OLDEST_PYTHON = (3, 10)
SLURM_DAEMONS = ("slurmctld", "slurmd", "slurmdbd")
CLOCK_S = 60.0  # maximum difference between two clocks; munge accepts 300 s
NEEDED_MIB = 400  # free disk space for packages, our code and logs
_SHOWN = 4
_LARGE_MIB = 10 << 10  # smaller file systems, such as /boot, are not listed


@dataclass(frozen=True)
class SshPlan:
    """The changes that `up` will make on each host."""

    cluster: Cluster
    plans: Mapping[str, NodePlan]
    changes: Mapping[str, tuple[MachineChange, ...]]
    facts: Mapping[str, HostFacts]
    cluster_id: str
    secrets: ClusterSecrets
    bundles: Mapping[str, CodeBundle] = field(default_factory=dict)  # our code, by its key
    fresh: bool = False
    unfinished: bool = False  # whether an earlier `up` was interrupted, or failed on some hosts
    faults: Mapping[str, DalsegnoError] = field(default_factory=dict)  # hosts that cannot be changed now, and why
    ids: AssignedIds = field(default_factory=AssignedIds)  # uids and gids of users and groups
    upgrades: tuple[str, ...] = ()  # hosts of the cluster whose version of our code differs from that of this machine
    may_upgrade: bool = False
    prometheus_in_file: bool = False  # whether the cluster file enables Prometheus; `monitor up` can enable it too
    monitor_switch: bool | None = None  # true for `dalsegno monitor up`, false for `monitor down`, else None
    remove_hosts: tuple[str, ...] = ()  # hosts that leave the cluster
    directory: DirectorySecrets | None = None  # secrets of the LDAP directory; None without a directory
    new_key: bool = False  # whether munge's key is replaced, because hosts that know it have left
    wait_for: tuple[str, ...] | None = ()  # jobs on nodes that leave the cluster, which must end first; None if unknown
    people: bool = False  # whether accounts, users and QOS change in Slurm
    remove_members: tuple[str, ...] = ()  # users to remove from Slurm's accounting
    reservations: bool = False
    old_reservations: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        moved = any(self.changes.values()) or self.remove_hosts or self.people or self.reservations
        return not (moved or self.fresh or self.unfinished or self.faults)

    @property
    def recorded(self) -> Cluster:
        """The cluster as the file describes it."""
        monitoring = replace(self.cluster.monitoring, prometheus=self.prometheus_in_file)
        return replace(self.cluster, monitoring=monitoring)

    @property
    def only_user(self) -> str:
        return ""

    @property
    def import_images(self) -> tuple[str, ...]:
        return () if self.empty else self.cluster.containers.images

    @property
    def reconfigures(self) -> bool:
        """Return whether slurmctld must read its files again, because slurm.conf changes without a restart of
        slurmctld."""
        return self.writes(f"{ETC}/slurm.conf") and not self._does(ChangeKind.SERVICE, "slurmctld")

    @property
    def head_first(self) -> bool:
        """Return whether the head must be changed before the other hosts, because they mount what it exports."""
        serves = any(service.name == NFS_SERVER for service in self.plans[self.cluster.head].services)
        return serves and any(change.kind is ChangeKind.MOUNT for each in self.changes.values() for change in each)

    @property
    def head_last(self) -> bool:
        """Return whether the head must be changed after the other hosts, because they unmount what it exported
        before."""
        gone = (ChangeAction.UNMOUNT, ChangeAction.CHANGE)
        return not self.head_first and any(
            change.kind is ChangeKind.MOUNT and change.action in gone
            for each in self.changes.values()
            for change in each
        )

    def writes(self, path: str) -> bool:
        return self._does(ChangeKind.FILE, path)

    def _does(self, kind: ChangeKind, name: str) -> bool:
        head = self.changes.get(self.cluster.head, ())
        return any(change.kind is kind and change.name == name for change in head)

    def sentences(self) -> list[str]:
        faults = [f"leaves out {error.what}" for error in self.faults.values()]
        if self.empty:
            return ["nothing to do: the cluster is as the file says"]
        if self.fresh:
            return [_creation(self), *_per_host(self), *self._pyxis(), *faults]
        lines = [
            (self.upgrades, f"updates Dal Segno on {named('host', self.upgrades)}, one after the other"),
            (self.unfinished, "finishes what an earlier `up` began"),
            (self.remove_hosts, f"drains and removes {named('host', self.remove_hosts)}"),
            (self.new_key, "replaces the key of munge, which the removed hosts know"),
            (self.people, "updates accounts, users and QOS"),
            (self.reservations, "updates reservations"),
            (self.reconfigures, "changes Slurm's settings in place (scontrol reconfigure)"),
        ]
        said = [line for condition, line in lines if condition]
        return [*said, *_per_host(self), *self._pyxis(), *faults, self._waits()]

    def _pyxis(self) -> list[str]:
        return ["uses the installed Pyxis for containers"] if uses_pyxis(self.cluster, self.facts) else []

    def _waits(self) -> str:
        if self.wait_for is None:
            return "slurmctld does not answer, so the jobs on the removed hosts are unknown"
        return f"waits for {named('job', self.wait_for)} to end first; ends no job" if self.wait_for else "ends no job"

    def details(self) -> list[str]:
        """Return a description of each host, and the names of its own files that the plan replaces."""
        lines = []
        for host, facts in self.facts.items():
            lines += [f"{host}: {line}" for line in describe_host(facts)]
            replaced = [each.name for each in self.changes.get(host, ()) if each.action is ChangeAction.REPLACE]
            if replaced:
                lines.append(f"{host}: keeps its own {', '.join(replaced)}, and `dalsegno down` restores them")
        return lines


def describe_host(facts: HostFacts) -> list[str]:
    """Return a host's system and hardware in one line.

    A host without a cluster gets a second line: its packages and listening ports.
    """
    driver = f" (driver {facts.driver})" if facts.driver else ""
    gpus = f", {len(facts.gpus)} x {facts.gpus[0].name}{driver}" if facts.gpus else ""
    fabric = f", fabric {', '.join(each.device for each in facts.fabric)}" if facts.fabric else ""
    free = "".join(f", {(disk.free_mib or 0) / 1024:.0f} GiB free on {disk.mount}" for disk in _large_disks(facts))
    systemd = "systemd" if facts.systemd else "no systemd"
    system = (
        f"{facts.os_id} {facts.os_version}, {counted(facts.cpus, 'CPU')}, {facts.memory_mib >> 10} GiB{gpus}{fabric}"
        f"{free}, {systemd}, cgroup v{facts.cgroup_version}"
    )
    has = [f"{name} {version}" for name, version in facts.packages]
    listens = [f"{each.port} ({each.program})" if each.program else str(each.port) for each in facts.listening]
    there = [f"{verb} {_listed(names)}" for verb, names in (("has", has), ("listens on", listens)) if names]
    return [system] if facts.record or not there else [system, "; ".join(there)]


def _large_disks(facts: HostFacts) -> list[InspectedDisk]:
    """Return the root file system and other large file systems, at most four in all.

    A file system that is mounted in several places is listed once.
    """
    found: dict[str, InspectedDisk] = {}
    for disk in sorted(facts.disks, key=lambda disk: len(disk.mount)):
        large = disk.type != "tmpfs" and (disk.size_mib or 0) >= _LARGE_MIB
        if disk.free_mib is not None and (disk.mount == "/" or large):
            found.setdefault(disk.source or disk.mount, disk)
    return list(found.values())[:_SHOWN]


def _creation(plan: SshPlan) -> str:
    nodes = [node for node in plan.cluster.nodes if not node.spare]
    spares = len(plan.cluster.nodes) - len(nodes)
    with_spares = f" and {counted(spares, 'spare')}" if spares else ""
    accounting = "with" if plan.cluster.slurm.accounting else "without"
    partitions = counted(len(plan.cluster.partitions), "partition")
    size = f"{counted(len(nodes), 'node')}{with_spares} in {partitions}"
    return f"creates {plan.cluster.name}: {size}, {accounting} accounting"


def _per_host(plan: SshPlan) -> list[str]:
    """Return a sentence for each change, with all hosts that have this change."""
    hosts: dict[str, list[str]] = {}
    for host, changes in plan.changes.items():
        for line in summarize(changes):
            hosts.setdefault(line, []).append(host)
    return [f"{_listed(names)}: {line}" for line, names in hosts.items()]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def summarize(changes: Iterable[MachineChange]) -> list[str]:
    """Return the consequences of a host's changes."""
    changes = list(changes)

    def those(kind: ChangeKind, *actions: ChangeAction) -> list[str]:
        return [each.name for each in changes if each.kind is kind and (not actions or each.action in actions)]

    packages = those(ChangeKind.PACKAGE)
    written = those(ChangeKind.FILE, ChangeAction.CREATE, ChangeAction.CHANGE)
    replaced = those(ChangeKind.FILE, ChangeAction.REPLACE)
    lines = [
        (packages, f"installs {named('package', packages)}"),
        (those(ChangeKind.CODE), "installs Dal Segno"),
        *(
            (found, f"{verb} {named(noun, found)}")
            for kind, noun in ((ChangeKind.USER, "user"), (ChangeKind.GROUP, "group"))
            for action, verb in _ACCOUNT_VERBS.items()
            if (found := those(kind, action)) is not None
        ),
        *(
            (found, f"{verb} {', '.join(found)}")
            for verb, actions in _MOUNT_VERBS.items()
            if (found := those(ChangeKind.MOUNT, *actions)) is not None
        ),
        (written, f"writes {named('file', written)}"),
        (replaced, f"replaces {named('file', replaced)}, which `down` restores"),
        (those(ChangeKind.FILE, ChangeAction.RESTORE), "restores files that are no longer needed"),
        *(
            (found, f"{verb} {', '.join(found)}")
            for action, verb in _VERBS.items()
            if (found := those(ChangeKind.SERVICE, action)) is not None
        ),
    ]
    return [line for condition, line in lines if condition]


_ACCOUNT_VERBS = {ChangeAction.CREATE: "adds", ChangeAction.CHANGE: "changes", ChangeAction.REMOVE: "removes"}
_MOUNT_VERBS = {"mounts": (ChangeAction.CREATE, ChangeAction.CHANGE), "unmounts": (ChangeAction.UNMOUNT,)}
_VERBS = {ChangeAction.START: "starts", ChangeAction.RESTART: "restarts", ChangeAction.STOP: "stops"}


def refuse_unbuilt(cluster: Cluster) -> None:
    """Raise an error if the cluster file has parts that Dal Segno does not set up on ssh hosts, so that nobody relies
    on them."""
    parts = {
        "`slurm.backup_controller`": cluster.slurm.backup_controller,
        "`containers.images` without `containers.folder`": bool(cluster.containers.images)
        and not cluster.containers.folder,
    }
    if found := [name for name, used in parts.items() if used]:
        raise TargetError(
            f"{' and '.join(found)} {'is' if len(found) == 1 else 'are'} not built yet for `target: ssh`",
            hint="remove it from the cluster file; docs/ssh.md says what is missing",
        )


def check_hosts(cluster: Cluster, facts: Mapping[str, HostFacts]) -> dict[str, DalsegnoError]:
    """Return the hosts that cannot be used, with the reason for each."""
    nodes = {node.name for node in cluster.nodes}
    twins = _twins(facts)
    faults: dict[str, DalsegnoError] = {}
    for host, each in facts.items():
        fault = (
            twins.get(host)
            or _false_name(host, each, cluster)
            or check_system(host, each, cluster.ssh, kinds_of(cluster, host))
            or _unfit(host, each)
        )
        if fault is None and host in nodes:
            fault = _too_small(host, each, cluster)
        if fault is not None:
            faults[host] = fault
    return faults


def _twins(facts: Mapping[str, HostFacts]) -> dict[str, TargetError]:
    """Return an error for each host that reports the same host name as another host, because Slurm could not tell them
    apart.

    If the cluster file gives a host this name, that host gets no error: a broken host must not exclude it.
    """
    counts = Counter(each.hostname for each in facts.values())
    faults = {}
    for host, each in facts.items():
        if counts[each.hostname] > 1 and each.hostname.partition(".")[0] != host.partition(".")[0]:
            others = [name for name, other in facts.items() if other.hostname == each.hostname and name != host]
            faults[host] = TargetError(
                f"{host}: its host name is `{each.hostname}`, the same as on {', '.join(others[:_SHOWN])}",
                hint="give each machine a host name of its own (`hostnamectl set-hostname NAME`), or check that "
                "`ssh: hosts:` does not name one machine twice",
            )
    return faults


_LATER_PYTHON = "Dal Segno needs Python 3.10 or later there: on RHEL 9 and its family, `dnf install python3.12`"


def _unfit(host: str, facts: HostFacts) -> DalsegnoError | None:
    if facts.python[:2] < OLDEST_PYTHON:
        version = ".".join(map(str, facts.python))
        return TargetError(f"{host}: Python {version} is too old", hint=_LATER_PYTHON)
    if abs(facts.clock_offset_s) > CLOCK_S:
        return TargetError(
            f"{host}: its clock differs by {abs(facts.clock_offset_s):.0f} s from the clock here",
            hint="start a time service such as chrony on that machine: munge refuses credentials from another time",
        )
    for folder in ("/var", "/opt"):
        free = facts.free_mib(folder)
        if free is not None and free < NEEDED_MIB:
            return TargetError(
                f"{host}: {folder} has {free} MiB left, and {NEEDED_MIB} MiB are needed",
                hint="free some space on that machine, then run `dalsegno up` again",
            )
    return None


def _false_name(host: str, facts: HostFacts, cluster: Cluster) -> DalsegnoError | None:
    """Return an error if the host reports a name that is not valid, or is the name of another host. The name is written
    to slurm.conf and /etc/hosts on all machines."""
    short = facts.hostname.partition(".")[0]
    others = {name for name in cluster.ssh.names if name != host}
    if is_node_name(facts.hostname) and is_node_name(short) and not {facts.hostname, short} & others:
        return None
    return TargetError(
        f"{host}: it calls itself `{facts.hostname}`, which is not a host name, or is the name of another host",
        hint="give the machine a host name of its own: `hostnamectl set-hostname NAME`",
    )


def _too_small(host: str, facts: HostFacts, cluster: Cluster) -> DalsegnoError | None:
    node = sized_node(next(each for each in cluster.nodes if each.name == host), facts)
    for noun, wanted, found in (
        ("CPUs", node.cpus, facts.cpus),
        ("MiB of memory", node.memory_mib, facts.memory_mib),
        ("GPUs", node.gpus, len(facts.gpus)),
    ):
        if wanted > found:
            return TargetError(
                f"{host}: the file says {wanted} {noun}, the machine has {found}",
                hint="correct the partition's size in the cluster file, or leave it out: the machine's own is used",
            )
    return None


def check_monitoring(cluster: Cluster, facts: Mapping[str, HostFacts]) -> dict[str, DalsegnoError]:
    """Return the hosts whose distribution lacks packages of Prometheus and node_exporter, with the reason for each."""
    faults: dict[str, DalsegnoError] = {}
    watched = {cluster.head, *(node.name for node in cluster.nodes)}
    for host, each in facts.items() if cluster.monitoring.prometheus else ():
        if host in watched and each.os_id not in DEBIAN:
            faults[host] = TargetError(
                f"{host}: {each.os_id} has no packages of Prometheus and node_exporter",
                hint="leave out `monitoring.prometheus`, and let a Prometheus of your own read `dalsegno exporter`",
            )
    return faults


def foreign_programs(host: str, facts: HostFacts, ports: Iterable[int]) -> DalsegnoError | None:
    """Return an error if the machine has another Slurm, or if another program uses one of our ports. Call this only for
    a machine that does not have a cluster of ours."""
    found = _foreign_slurm(host, facts)
    taken = next((each for each in facts.listening if each.port in ports), None)
    if found or taken is None:
        return found
    return TargetError(
        f"{host}: port {taken.port} is used by {taken.program or 'another program'}",
        hint="stop that program, or choose another host",
    )


def _foreign_slurm(host: str, facts: HostFacts) -> DalsegnoError | None:
    daemons = [name for name in facts.daemons if name in SLURM_DAEMONS]
    if not facts.slurm_conf and not daemons:
        return None
    running = f" and runs {', '.join(daemons)}" if daemons else ""
    found = f"has {facts.slurm_conf}" if facts.slurm_conf else "has no slurm.conf"
    return TargetError(
        f"{host}: another Slurm is set up there: it {found}{running}",
        hint="Dal Segno does not replace it; remove that Slurm's slurm.conf and daemons first, or choose another host",
    )


def check_releases(cluster: Cluster, facts: Mapping[str, HostFacts]) -> dict[str, DalsegnoError]:
    """Return the hosts that have another release of Slurm than the head."""
    if cluster.head not in facts:
        return {}
    wanted = slurm_version(facts[cluster.head], cluster.ssh).release
    releases = {host: slurm_version(each, cluster.ssh).release for host, each in facts.items()}
    return {
        host: TargetError(
            f"{host}: it has Slurm {release}, and the head has {wanted}",
            hint="use the same release of the same distribution on all hosts",
        )
        for host, release in releases.items()
        if release != wanted
    }
