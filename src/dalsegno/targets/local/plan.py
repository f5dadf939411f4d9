"""The plan of a local cluster: the difference between its present and its desired state. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dalsegno.errors import TargetError
from dalsegno.health.settings import FILE as HEALTH
from dalsegno.spec.facts import Cluster
from dalsegno.system.hosts import ServiceFact
from dalsegno.targets.base import counted, named
from dalsegno.targets.local.desired import Desired, File
from dalsegno.targets.local.folder import ApplyStage, ClusterState
from dalsegno.targets.local.placement import Placement
from dalsegno.users.accounts import AccountPlan, AccountSet, plan_accounts
from dalsegno.users.roster import removed_by_command


@dataclass(frozen=True)
class RunningJob:
    """A job that a change could affect. A pending job has no nodes yet."""

    id: str
    partition: str
    nodes: frozenset[str]


@dataclass(frozen=True)
class Observed:
    """The present state of a cluster; empty if there is no cluster."""

    state: ClusterState | None = None
    applied: Cluster | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    alive: frozenset[str] = frozenset()  # running hosts
    services: Mapping[str, Mapping[str, ServiceFact]] = field(default_factory=dict)
    jobs: tuple[RunningJob, ...] | None = ()  # None if slurmctld does not answer
    faulty: tuple[str, ...] = ()  # hosts with injected faults
    unbound: tuple[str, ...] = ()  # hosts that have lost their own user, group or hosts file, or their storage
    binds: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)  # host -> its bind mounts
    images: frozenset[str] = frozenset()  # imported images
    accounts: AccountSet = field(default_factory=AccountSet)  # accounts that the cluster has so far
    directory: AccountSet = field(default_factory=AccountSet)  # accounts in the cluster's LDAP directory


@dataclass(frozen=True)
class LocalPlan:
    """The changes that `up` will make, as names of hosts, nodes, files and services."""

    cluster: Cluster
    placement: Placement
    desired: Desired
    fresh: bool
    unfinished: bool = False  # whether an earlier `up` was interrupted, so that all steps are repeated
    add_nodes: tuple[str, ...] = ()
    remove_nodes: tuple[str, ...] = ()
    remove_partitions: tuple[str, ...] = ()
    remove_hosts: tuple[str, ...] = ()  # hosts of removed nodes, and removed login or backup hosts
    boot: tuple[str, ...] = ()
    clear_faults: tuple[str, ...] = ()  # hosts whose injected faults are undone
    bind: tuple[str, ...] = ()  # hosts that get their own user, group and hosts file, or their storage back
    remount: tuple[str, ...] = ()  # running hosts whose mounts change
    mounts: tuple[str, ...] = ()  # sentences about storage that is added or removed
    write: tuple[str, ...] = ()
    start: tuple[tuple[str, str], ...] = ()  # pairs of host and service
    restart: tuple[tuple[str, str], ...] = ()
    stop: tuple[tuple[str, str], ...] = ()
    reconfigure: bool = False
    people: AccountPlan = field(default_factory=AccountPlan)
    accounting: bool = False
    remove_members: tuple[str, ...] = ()  # users to remove from Slurm's accounting
    reservations: bool = False
    old_reservations: tuple[str, ...] = ()
    wait_for: tuple[str, ...] | None = ()  # jobs that must end before the change; None if unknown
    blocked: tuple[str, ...] = ()  # pending jobs in a removed partition; the user must cancel or move them first
    import_images: tuple[str, ...] = ()  # images to import last, when the cluster is up
    left_out: tuple[str, ...] = ()  # sentences about what may surprise the user
    limits: str = ""  # sentence about limits on jobs; `plan` shows it, `up` does not
    containers: bool | None = None  # whether containers are being switched on (true) or off (false); None if unchanged
    no_containers: str = ""  # why containers are off, if the cluster file leaves the choice to the machine
    monitor_switch: bool | None = None  # true for `dalsegno monitor up`, false for `monitor down`, else None
    only_user: str = ""  # the account that all jobs run as on loopback ports

    @property
    def empty(self) -> bool:
        return not (self.changes or self.import_images)

    @property
    def changes(self) -> bool:
        """Return whether the cluster itself changes."""
        return bool(
            self.fresh or self.unfinished or self.bind or self.remount
            or self.remove_hosts or self.remove_partitions or self.boot or self.clear_faults or self.write or self.start
            or self.restart or self.stop or self.accounting or self.reservations or self.remove_nodes
            or not self.people.empty
        )  # fmt: skip

    def sentences(self) -> list[str]:
        without = [f"leaves out containers: {self.no_containers}"] if self.no_containers else []
        if self.fresh:
            return [_creation(self), *self.left_out, *without, *_imports(self)]
        if self.empty:
            return ["nothing to do: the cluster is as the file says", *without]
        noted = self.left_out if "etc/passwd" in self.write else ()
        return [*_changes(self), *noted, *without, *_imports(self), _restarts(self), _jobs(self)]

    def details(self) -> list[str]:
        return [self.limits] if self.fresh else []


def make_plan(wanted: Cluster, placement: Placement, desired: Desired, seen: Observed) -> LocalPlan:
    """Return the plan that turns the present state `seen` into the desired one."""
    before = seen.applied
    fresh = seen.state is None
    unfinished = seen.state is not None and seen.state.phase is not ApplyStage.UP
    if before is not None:
        _refuse_impossible(before, wanted)
    old_nodes = [node.name for node in before.nodes] if before else []
    new_nodes = [node.name for node in wanted.nodes]
    gone_nodes = _without(old_nodes, new_nodes)
    gone_partitions = (
        _without([p.name for p in before.partitions], [p.name for p in wanted.partitions]) if before else ()
    )
    write = tuple(name for name, file in desired.files.items() if _differs(file, seen.files.get(name)))
    start, restart = _services(desired, seen)
    return LocalPlan(
        wanted,
        placement,
        desired,
        fresh,
        unfinished,
        add_nodes=_without(new_nodes, old_nodes),
        remove_nodes=gone_nodes,
        remove_partitions=gone_partitions,
        remove_hosts=_without([*seen.services, *seen.alive, *gone_nodes], desired.hosts),
        boot=_without(desired.hosts, seen.alive),
        clear_faults=tuple(name for name in seen.faulty if name in new_nodes),
        bind=tuple(name for name in seen.unbound if name in desired.hosts),
        remount=_remounted(desired, seen),
        mounts=_storage_changes(before, wanted),
        write=write,
        start=start,
        restart=restart,
        stop=_superfluous(desired, seen),
        reconfigure=not fresh
        and ("etc/slurm.conf" in write or unfinished)
        and not any(name == "slurmctld" for _, name in restart),
        people=plan_accounts(
            desired.accounts, seen.directory if wanted.directory.ldap else seen.accounts, seen.accounts
        ),
        accounting=wanted.slurm.accounting and (before is None or _people(before) != _people(wanted)),
        remove_members=removed_by_command(before, wanted),
        reservations=(before.reservations if before else ()) != wanted.reservations,
        old_reservations=_reservation_names(before, wanted),
        wait_for=_jobs_on_removed(seen.jobs, gone_nodes, gone_partitions),
        blocked=tuple(job.id for job in seen.jobs or () if not job.nodes and job.partition in gone_partitions),
        import_images=_without(wanted.containers.images, seen.images),
        containers=_switched(before, wanted),
    )


def _remounted(desired: Desired, seen: Observed) -> tuple[str, ...]:
    alive = (host for name, host in desired.hosts.items() if name in seen.alive and name in seen.binds)
    return tuple(host.name for host in alive if set(host.binds) != set(seen.binds[host.name]))


def _storage_changes(before: Cluster | None, wanted: Cluster) -> tuple[str, ...]:
    if before is None:
        return ()
    old, new = ({storage.name: storage for storage in cluster.storage} for cluster in (before, wanted))
    added = [f"mounts storage {name} at {each.mount}" for name, each in new.items() if old.get(name) != each]
    gone = [each for name, each in old.items() if name not in new or new[name].mount != each.mount]
    left = [f"unmounts {each.mount} (storage {each.name}); jobs that use it fail" for each in gone]
    lost = [
        f"keeps the files of storage {each.name} in the state folder until `down`"
        for each in gone
        if each.type == "folder" and not each.source and each.name not in new
    ]
    return (*left, *lost, *added)


def _switched(before: Cluster | None, wanted: Cluster) -> bool | None:
    after = bool(wanted.containers.enabled)
    return after if before is not None and bool(before.containers.enabled) != after else None


def _without(names: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Return the names that are not in `others`, each once, in order."""
    known = set(others)
    return tuple(dict.fromkeys(name for name in names if name not in known))


def _differs(file: File, found: str | None) -> bool:
    return found is None or (found != file.text if file.stamp == "" else file.stamp not in found)


def _reservation_names(before: Cluster | None, wanted: Cluster) -> tuple[str, ...]:
    """Return the reservations that may exist: those of the last complete `up`, and those of the present cluster file.

    An interrupted `up` may have created some reservations of the present file.
    """
    names = [item.name for cluster in (before, wanted) if cluster for item in cluster.reservations]
    return tuple(dict.fromkeys(names))


def _jobs_on_removed(
    jobs: tuple[RunningJob, ...] | None, nodes: Iterable[str], partitions: Iterable[str]
) -> tuple[str, ...] | None:
    """Return the jobs on nodes or in partitions that will be removed; None if the jobs are unknown."""
    if jobs is None:
        return None
    gone_nodes, gone_partitions = set(nodes), set(partitions)
    return tuple(job.id for job in jobs if job.nodes & gone_nodes or job.partition in gone_partitions)


def _people(cluster: Cluster) -> object:
    """Return the accounts, users and QOS, without the settings of users that Slurm's database does not store."""
    members = [
        replace(user, uid=None, groups=(), allow_privileged=(), ssh_keys=(), full_name="", added=False)
        for user in cluster.users
    ]
    return (cluster.accounts, members, cluster.slurm.qos)


def _services(desired: Desired, seen: Observed) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Return two lists of services on running hosts: those that do not run, and those that run with old settings."""
    start, restart = [], []
    for host in desired.hosts.values():
        if host.name in seen.alive:
            facts = seen.services.get(host.name, {})
            for service in host.services:
                fact = facts.get(service.name)
                if fact is None or not fact.running:
                    start.append((host.name, service.name))
                elif fact.revision != service.revision:
                    restart.append((host.name, service.name))
    return tuple(start), tuple(restart)


def _superfluous(desired: Desired, seen: Observed) -> tuple[tuple[str, str], ...]:
    """Return the running services that are no longer in their host's plan."""
    return tuple(
        (host.name, name)
        for host in desired.hosts.values()
        if host.name in seen.alive
        for name, fact in seen.services.get(host.name, {}).items()
        if fact.running and all(service.name != name for service in host.services)
    )


def _refuse_impossible(before: Cluster, wanted: Cluster) -> None:
    if before.slurm.accounting != wanted.slurm.accounting:
        word = "on" if wanted.slurm.accounting else "off"
        raise TargetError(
            f"accounting cannot be switched {word} while the cluster is up: job ids would be used twice",
            hint=f"`dalsegno down {wanted.name}`, then `dalsegno up`",
        )
    if before.directory.ldap and wanted.directory.ldap and before.directory.base != wanted.directory.base:
        raise TargetError(
            f"the base of the directory cannot change from {before.directory.base} while the cluster is up",
            hint=f"`dalsegno down {wanted.name}`, then `dalsegno up`",
        )
    if before.head != wanted.head:
        raise TargetError(
            f"the head cannot be renamed from `{before.head}` to `{wanted.head}` while the cluster is up",
            hint=f"`dalsegno down {wanted.name}`, then `dalsegno up`",
        )


def _creation(plan: LocalPlan) -> str:
    nodes = [node for node in plan.cluster.nodes if not node.spare]
    spares = len(plan.cluster.nodes) - len(nodes)
    with_spares = f" and {counted(spares, 'spare')}" if spares else ""
    gpus = sum(node.gpus for node in nodes)
    kind = "simulated " if plan.placement.gpus_simulated else ""
    with_gpus = f" with {counted(gpus, f'{kind}GPU')}" if gpus else ""
    with_accounting = "with" if plan.cluster.slurm.accounting else "without"
    count = counted(len(nodes), f"{plan.placement.hosts} node")
    return (
        f"creates {plan.cluster.name}: {count}{with_gpus}{with_spares} in "
        f"{counted(len(plan.cluster.partitions), 'partition')}, {with_accounting} accounting"
    )


def _changes(plan: LocalPlan) -> list[str]:
    back = [name for name in plan.boot if name not in plan.add_nodes]
    other_hosts = [name for name in plan.remove_hosts if name not in plan.remove_nodes]
    dead = [f"{name} on {host}" for host, name in plan.start]
    ended = [f"{name} on {host}" for host, name in plan.stop]
    people = "etc/passwd" in plan.write or "etc/group" in plan.write
    lines = [
        *((True, line) for line in plan.people.sentences()),
        (plan.unfinished, "finishes what an earlier `up` began"),
        (plan.add_nodes, f"adds {named('node', plan.add_nodes)}"),
        (plan.remove_nodes, f"drains and removes {named('node', plan.remove_nodes)}"),
        (plan.remove_partitions, f"removes {named('partition', plan.remove_partitions)}"),
        (other_hosts, f"removes {named('host', other_hosts)}"),
        (back, f"boots {named('host', back)}"),
        (plan.clear_faults, f"undoes the faults injected into {named('host', plan.clear_faults)}"),
        (plan.bind, f"mounts the cluster's own files on {named('host', plan.bind)} again"),
        (people and plan.people.empty and not plan.accounting, "updates the users and groups that hosts know"),
        (dead, f"starts {', '.join(dead[:4])}{' …' if len(dead) > 4 else ''}"),
        (ended, f"stops {', '.join(ended[:4])}{' …' if len(ended) > 4 else ''}"),
        (plan.containers, "switches containers on (`srun --container-image`)"),
        (plan.containers is False, "switches containers off"),
        (plan.reconfigure, "changes Slurm's settings in place (scontrol reconfigure)"),
        (f"etc/{HEALTH}" in plan.write, "changes the recovery of nodes (`health:`)"),
        (any(name.startswith("monitor/") for name in plan.write), "changes what Prometheus reads and reports"),
        (plan.accounting, "updates accounts, users and QOS"),
        (plan.reservations, "updates reservations"),
    ]
    return [*(line for condition, line in lines if condition), *plan.mounts]


def _imports(plan: LocalPlan) -> list[str]:
    return [f"imports {named('image', plan.import_images)}"] if plan.import_images else []


def _restarts(plan: LocalPlan) -> str:
    names = [name.partition(":")[0] for _, name in plan.restart]
    counts = [f"{names.count(name)} {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
    return f"restarts {' and '.join(counts)}; running jobs continue" if counts else "restarts nothing"


def _jobs(plan: LocalPlan) -> str:
    if plan.wait_for is None and (plan.remove_nodes or plan.remove_partitions):
        return "slurmctld does not answer, so the affected jobs are unknown"
    if plan.blocked:
        jobs = named("job", plan.blocked)
        return f"cannot: {jobs} is pending in a partition that will be removed; cancel or move it first"
    if plan.wait_for:
        return f"waits for {named('job', plan.wait_for)} to end first; ends no job"
    return "ends no job"
