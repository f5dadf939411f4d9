"""Compute the nodes of each partition, and the sizes of machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dalsegno.errors import NotThere
from dalsegno.hardware import Gpu, Instance, find_gpu, find_instance, gpu_of

if TYPE_CHECKING:  # not imported at run time, because pydantic takes 0.1 s and the local target needs only the sizes
    from dalsegno.spec.model import ClusterSpec, MachineSpec, PartitionSpec


def find_cycle(below: dict[str, list[str]]) -> list[str]:
    """Return one cycle in a graph, which maps each name to its neighbours; [] if there is none."""
    done: set[str] = set()
    for start in below:
        trail: list[str] = []
        if _walk(start, below, trail, done):
            return trail[trail.index(trail[-1]) : -1]
    return []


def _walk(start: str, below: dict[str, list[str]], trail: list[str], done: set[str]) -> bool:
    """Search depth first and return whether there is a cycle, which is then at the end of `trail`.

    The search is not recursive, because a chain may be long.
    """
    open_at = {start: iter(below.get(start, []))}
    trail.append(start)
    while trail:
        follower = next(open_at[trail[-1]], None)
        if follower is None:
            done.add(trail[-1])
            del open_at[trail.pop()]
        elif follower in open_at:
            trail.append(follower)
            return True
        elif follower not in done:
            trail.append(follower)
            open_at[follower] = iter(below.get(follower, []))
    return False


def own_nodes(partition: PartitionSpec) -> list[str]:
    """Return the partition's own nodes, without spares; [] if it takes its nodes from other partitions."""
    if partition.nodes_from:
        return []
    return _names(partition, partition.nodes or 0, first=1)


def own_spares(partition: PartitionSpec) -> list[str]:
    """Return the partition's own spares. If the file gives only their number, they are numbered after the nodes."""
    if partition.nodes_from:
        return []
    return _names(partition, partition.spares, first=len(own_nodes(partition)) + 1)


def _names(partition: PartitionSpec, wanted: int | Sequence[str], first: int) -> list[str]:
    if not isinstance(wanted, int):
        return list(wanted)
    # Node names are host names, which have no upper case and no underscore.
    base = partition.name.lower().replace("_", "-")
    return [f"{base}-{number}" for number in range(first, first + wanted)]


def login_nodes(spec: ClusterSpec) -> list[str]:
    """Return the names of the login nodes."""
    return list(spec.login.names) or [f"login-{number}" for number in range(1, spec.login.count + 1)]


def members(spec: ClusterSpec) -> dict[str, list[str]]:
    """Return the nodes of each partition, spares last. A shared node is in all partitions that share it."""
    by_name = {partition.name: partition for partition in spec.partitions}
    spares = {name for partition in spec.partitions for name in own_spares(partition)}
    held: dict[str, list[str]] = {}
    waiting = list(by_name.values())
    while waiting:
        ready = [each for each in waiting if all(name in held or name not in by_name for name in each.nodes_from)]
        # Partitions in a cycle are never ready. The checks report the cycle; here, the partitions have no nodes.
        for partition in ready or waiting:
            held[partition.name] = _gather(partition, held, spares)
        waiting = [each for each in waiting if each.name not in held]
    return held


def _gather(partition: PartitionSpec, held: dict[str, list[str]], spares: set[str]) -> list[str]:
    if not partition.nodes_from:
        return own_nodes(partition) + own_spares(partition)
    shared = dict.fromkeys(name for source in partition.nodes_from for name in held.get(source, []))
    if not isinstance(partition.nodes, int):
        return list(shared)
    return [*(name for name in shared if name not in spares), *(name for name in shared if name in spares)][
        : partition.nodes
    ]


def find_partition_cycle(spec: ClusterSpec) -> list[str]:
    """Return partitions that take their nodes from each other in a cycle; [] if there are none."""
    sources = {partition.name: partition.nodes_from for partition in spec.partitions}
    return find_cycle(sources)


# Default size of a local node: enough for a toy job, and small enough for many nodes on a laptop
_LOCAL_CPUS, _LOCAL_MEMORY_MIB = 2, 2048
# Some memory is left for the system, because Slurm drains a node that registers with less than slurm.conf says.
ALLOCATABLE = 0.95
UNSIZED_MIB = int(_LOCAL_MEMORY_MIB * ALLOCATABLE)  # memory of a local node without a size in the file


@dataclass(frozen=True)
class Size:
    """A machine's resources. If cpus or memory are 0, the size found on the machine is used."""

    cpus: int
    memory_mib: int  # the memory that Slurm may allocate
    gpus: int = 0
    gpu_type: str = ""
    gpu_memory_mib: int = 0
    gres: str = "gpu"
    instance: str = ""


def catalog_instance(machine: MachineSpec) -> Instance | None:
    """Return the machine's instance type; None if it has none or the catalog does not list it."""
    try:
        return find_instance(machine.instance) if machine.instance else None
    except NotThere:
        return None


def catalog_gpu(gpu_type: str) -> Gpu | None:
    """Return the GPU with this Slurm type; None if the catalog does not list it."""
    try:
        return find_gpu(gpu_type)
    except NotThere:
        return None


def size_of(partition: PartitionSpec, target: str) -> Size:
    """Return the resources of each of the partition's own nodes."""
    instance = catalog_instance(partition)
    gpu = gpu_of(instance) if instance else catalog_gpu(partition.gpu_type)
    gpu_memory_gib = (instance and instance.gpu_memory_gib) or (gpu.memory_gib if gpu else 0)
    gpus = instance.gpus if instance and instance.gpus else partition.gpus or 0
    return Size(
        cpus=_cpus(partition, instance, target),
        memory_mib=int(_memory_mib(partition, instance, target) * (1 if target == "existing" else ALLOCATABLE)),
        gpus=gpus,
        gpu_type=(gpu.slurm_type if gpu else partition.gpu_type) if gpus else "",
        gpu_memory_mib=int(gpu_memory_gib * 1024) if gpus else 0,
        gres=gpu.kind if gpu and gpus else "gpu",
        instance=instance.name if instance else partition.instance,
    )


def _cpus(machine: MachineSpec, instance: Instance | None, target: str) -> int:
    default = _LOCAL_CPUS if target == "local" else 0
    return machine.cpus or (instance and instance.cpus) or default


def _memory_mib(machine: MachineSpec, instance: Instance | None, target: str) -> int:
    default = _LOCAL_MEMORY_MIB if target == "local" else 0
    return machine.memory or (instance and int((instance.memory_gib or 0) * 1024)) or default
