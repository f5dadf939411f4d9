"""The difference between what a local cluster is and what it should be, as a value. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dalsegno.errors import TargetError
from dalsegno.health.settings import FILE as HEALTH
from dalsegno.spec.facts import Cluster
from dalsegno.system.hosts import ServiceFact
from dalsegno.targets.base import counted, named
from dalsegno.targets.local.desired import Desired, File
from dalsegno.targets.local.folder import ApplyStage, ClusterState
from dalsegno.targets.local.placement import Placement


@dataclass(frozen=True)
class RunningJob:
    """A job that a change could hurt; one that waits has no nodes yet."""

    id: str
    partition: str
    nodes: frozenset[str]


@dataclass(frozen=True)
class Observed:
    """A cluster as it stands: all empty where there is none."""

    state: ClusterState | None = None
    applied: Cluster | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    alive: frozenset[str] = frozenset()  # hosts
    services: Mapping[str, Mapping[str, ServiceFact]] = field(default_factory=dict)
    jobs: tuple[RunningJob, ...] | None = ()  # None: slurmctld does not say
    broken: tuple[str, ...] = ()  # hosts with faults that were injected
    unbound: tuple[str, ...] = ()  # hosts that have lost their own user, group or hosts file
    images: frozenset[str] = frozenset()  # that are imported


@dataclass(frozen=True)
class LocalPlan:
    """What `up` will do. Everything named is a host, a node, a file or a service of the cluster."""

    cluster: Cluster
    placement: Placement
    desired: Desired
    fresh: bool
    unfinished: bool = False  # an earlier `up` was cut short: whatever it left, is done again
    add_nodes: tuple[str, ...] = ()
    remove_nodes: tuple[str, ...] = ()
    remove_partitions: tuple[str, ...] = ()
    remove_hosts: tuple[str, ...] = ()  # the removed nodes' hosts, and login or backup hosts
    boot: tuple[str, ...] = ()
    mend: tuple[str, ...] = ()  # hosts whose injected faults are undone
    bind: tuple[str, ...] = ()  # hosts that get their own user, group and hosts file back
    write: tuple[str, ...] = ()
    start: tuple[tuple[str, str], ...] = ()  # (host, service)
    restart: tuple[tuple[str, str], ...] = ()
    reconfigure: bool = False
    accounting: bool = False
    reservations: bool = False
    old_reservations: tuple[str, ...] = ()
    wait_for: tuple[str, ...] | None = ()  # jobs that must end first; None: not known
    blocked: tuple[str, ...] = ()  # jobs that wait in a partition which is to go: someone must decide about them
    import_images: tuple[str, ...] = ()  # when all else is done
    left_out: tuple[str, ...] = ()  # what the file asks for and this target does not do yet
    limits: str = ""  # what jobs are held to: for who asks what would be made, not for who makes it
    containers: bool | None = None  # they are switched on or off; None: they stay as they are
    no_containers: str = ""  # why there are none, where the file leaves it to the machine
    only_user: str = ""  # the account that all jobs run as on loopback ports

    @property
    def empty(self) -> bool:
        return not (self.changes or self.import_images)

    @property
    def changes(self) -> bool:
        """To the cluster itself."""
        return bool(
            self.fresh or self.unfinished or self.bind
            or self.remove_hosts or self.remove_partitions or self.boot or self.mend or self.write or self.start
            or self.restart or self.accounting or self.reservations or self.remove_nodes
        )  # fmt: skip

    def sentences(self) -> list[str]:
        without = [f"leaves out containers: {self.no_containers}"] if self.no_containers else []
        if self.fresh:
            return [_creation(self), *self.left_out, *without, *_imports(self)]
        if self.empty:
            return ["nothing to do: the cluster is as the file says", *without]
        said = self.left_out if "etc/passwd" in self.write else ()
        return [*_changes(self), *said, *without, *_imports(self), _restarts(self), _jobs(self)]

    def details(self) -> list[str]:
        return [self.limits] if self.fresh else []


def make_plan(wanted: Cluster, placement: Placement, desired: Desired, seen: Observed) -> LocalPlan:
    """What has to happen so that what is seen becomes what is wanted."""
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
        mend=tuple(name for name in seen.broken if name in new_nodes),
        bind=tuple(name for name in seen.unbound if name in desired.hosts),
        write=write,
        start=start,
        restart=restart,
        reconfigure=not fresh
        and ("etc/slurm.conf" in write or unfinished)
        and not any(name == "slurmctld" for _, name in restart),
        accounting=wanted.slurm.accounting and (before is None or _people(before) != _people(wanted)),
        reservations=(before.reservations if before else ()) != wanted.reservations,
        old_reservations=_reservation_names(before, wanted),
        wait_for=_in_the_way(seen.jobs, gone_nodes, gone_partitions),
        blocked=tuple(job.id for job in seen.jobs or () if not job.nodes and job.partition in gone_partitions),
        import_images=_without(wanted.containers.images, seen.images),
        containers=_switched(before, wanted),
    )


def _switched(before: Cluster | None, wanted: Cluster) -> bool | None:
    after = bool(wanted.containers.enabled)
    return after if before is not None and bool(before.containers.enabled) != after else None


def _without(names: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Those names that are not among the others, each once, in order."""
    known = set(others)
    return tuple(dict.fromkeys(name for name in names if name not in known))


def _differs(file: File, found: str | None) -> bool:
    return found is None or (found != file.text if file.stamp == "" else file.stamp not in found)


def _reservation_names(before: Cluster | None, wanted: Cluster) -> tuple[str, ...]:
    """Those that may be there: of the last file, and of this one, should an earlier `up` have been cut short."""
    names = [item.name for cluster in (before, wanted) if cluster for item in cluster.reservations]
    return tuple(dict.fromkeys(names))


def _in_the_way(
    jobs: tuple[RunningJob, ...] | None, nodes: Iterable[str], partitions: Iterable[str]
) -> tuple[str, ...] | None:
    """The jobs on what is to go."""
    if jobs is None:
        return None
    gone_nodes, gone_partitions = set(nodes), set(partitions)
    return tuple(job.id for job in jobs if job.nodes & gone_nodes or job.partition in gone_partitions)


def _people(cluster: Cluster) -> object:
    return (cluster.accounts, cluster.users, cluster.slurm.qos)


def _services(desired: Desired, seen: Observed) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Services of living hosts that do not run, and those that run with old settings."""
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


def _refuse_impossible(before: Cluster, wanted: Cluster) -> None:
    if before.slurm.accounting != wanted.slurm.accounting:
        word = "on" if wanted.slurm.accounting else "off"
        raise TargetError(
            f"accounting cannot be switched {word} while the cluster is up: job ids would clash with old ones",
            hint=f"`dalsegno down {wanted.name}`, then `dalsegno up`",
        )
    if before.head != wanted.head:
        raise TargetError(
            f"the head cannot be renamed from `{before.head}` to `{wanted.head}` while the cluster is up",
            hint=f"`dalsegno down {wanted.name}`, then `dalsegno up`",
        )


# Words -----------------------------------------------------------------------------------------------------


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
    people = "etc/passwd" in plan.write or "etc/group" in plan.write
    lines = [
        (plan.unfinished, "finishes what an earlier `up` began"),
        (plan.add_nodes, f"adds {named('node', plan.add_nodes)}"),
        (plan.remove_nodes, f"drains and removes {named('node', plan.remove_nodes)}"),
        (plan.remove_partitions, f"removes {named('partition', plan.remove_partitions)}"),
        (other_hosts, f"removes {named('host', other_hosts)}"),
        (back, f"boots {named('host', back)}"),
        (plan.mend, f"undoes the faults injected into {named('host', plan.mend)}"),
        (plan.bind, f"gives {named('host', plan.bind)} their own users back"),
        (people and not plan.accounting, "updates the users and groups that hosts know"),
        (dead, f"starts {', '.join(dead[:4])}{' …' if len(dead) > 4 else ''}"),
        (plan.containers, "switches containers on (`srun --container-image`)"),
        (plan.containers is False, "switches containers off"),
        (plan.reconfigure, "changes Slurm's settings in place (scontrol reconfigure)"),
        (f"etc/{HEALTH}" in plan.write, "changes how nodes are looked after (`health:`)"),
        (plan.accounting, "updates accounts, users and QOS"),
        (plan.reservations, "updates reservations"),
    ]
    return [line for condition, line in lines if condition]


def _imports(plan: LocalPlan) -> list[str]:
    return [f"imports {named('image', plan.import_images)}"] if plan.import_images else []


def _restarts(plan: LocalPlan) -> str:
    names = [name.partition(":")[0] for _, name in plan.restart]
    counts = [f"{names.count(name)} {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
    return f"restarts {' and '.join(counts)}; running jobs go on" if counts else "restarts nothing"


def _jobs(plan: LocalPlan) -> str:
    if plan.wait_for is None and (plan.remove_nodes or plan.remove_partitions):
        return "slurmctld does not answer: which jobs this would hurt is not known"
    if plan.blocked:
        return f"cannot: {named('job', plan.blocked)} waits in a partition that is to go; cancel or move it first"
    if plan.wait_for:
        return f"waits for {named('job', plan.wait_for)} to end first; ends no job"
    return "ends no job"
