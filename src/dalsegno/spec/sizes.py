"""How large a machine comes out: from the catalog, from the file, or by default."""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.errors import NotThere
from dalsegno.hardware import Gpu, Instance, find_gpu, find_instance, gpu_of
from dalsegno.spec.partition import Machine, Partition

# What a plain local node gets: enough for a toy job, little enough that many fit on a laptop.
_LOCAL_CPUS, _LOCAL_MEMORY_MIB = 2, 2048
# The system needs some; a node that registers with less than slurm.conf says is drained.
_HANDED_OUT = 0.95
UNSIZED_MIB = int(_LOCAL_MEMORY_MIB * _HANDED_OUT)  # the memory of a local node whose size the file leaves to us


@dataclass(frozen=True)
class Size:
    """A machine's resources. Zero cpus or memory: as found on the machine."""

    cpus: int
    memory_mib: int  # what Slurm may hand out
    gpus: int = 0
    gpu_type: str = ""
    gpu_memory_mib: int = 0
    gres: str = "gpu"
    instance: str = ""


def catalog_instance(machine: Machine) -> Instance | None:
    """The machine's instance type, None where none is named or the catalog does not know it."""
    try:
        return find_instance(machine.instance) if machine.instance else None
    except NotThere:
        return None


def catalog_gpu(gpu_type: str) -> Gpu | None:
    """The GPU of that Slurm type, None if the catalog does not know it."""
    try:
        return find_gpu(gpu_type)
    except NotThere:
        return None


def size_of(partition: Partition, target: str) -> Size:
    """What each node of the partition has."""
    instance = catalog_instance(partition)
    gpu = gpu_of(instance) if instance else catalog_gpu(partition.gpu_type)
    gpu_memory_gib = (instance and instance.gpu_memory_gib) or (gpu.memory_gib if gpu else 0)
    gpus = instance.gpus if instance and instance.gpus else partition.gpus or 0
    return Size(
        cpus=_cpus(partition, instance, target),
        memory_mib=int(_memory_mib(partition, instance, target) * _HANDED_OUT),
        gpus=gpus,
        gpu_type=(gpu.slurm_type if gpu else partition.gpu_type) if gpus else "",
        gpu_memory_mib=int(gpu_memory_gib * 1024) if gpus else 0,
        gres=gpu.kind if gpu and gpus else "gpu",
        instance=instance.name if instance else partition.instance,
    )


def _cpus(machine: Machine, instance: Instance | None, target: str) -> int:
    default = _LOCAL_CPUS if target == "local" else 0
    return machine.cpus or (instance and instance.cpus) or default


def _memory_mib(machine: Machine, instance: Instance | None, target: str) -> int:
    default = _LOCAL_MEMORY_MIB if target == "local" else 0
    return machine.memory or (instance and int((instance.memory_gib or 0) * 1024)) or default
