"""Machines: the instance type against the sizes asked for."""

from __future__ import annotations

from dalsegno.errors import NotThere
from dalsegno.hardware import Instance, find_instance, gpu_of, gpus, instances
from dalsegno.spec.checks.report import Report
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.partition import Machine, Partition
from dalsegno.spec.sizes import catalog_gpu, catalog_instance

_PROVIDERS = {"parallelcluster": "aws", "hyperpod": "aws", "oci": "oci"}


def check_machines(spec: ClusterSpec, report: Report) -> None:
    """Head, login and every partition that brings machines of its own."""
    machines: list[tuple[Machine, str]] = [(spec.head, "the head node"), (spec.login, "a login node")]
    own = [partition for partition in spec.partitions if not partition.nodes_from]
    machines += [(partition, f"partition `{partition.name}`") for partition in own]
    for machine, whose in machines:
        _instance(machine, whose, spec, report)
        if instance := catalog_instance(machine):
            _sizes(machine, whose, instance, report)
    for partition in own:
        _gpus(partition, report)
        _cloud_needs_instance(partition, spec, report)


def _instance(machine: Machine, whose: str, spec: ClusterSpec, report: Report) -> None:
    if not machine.instance:
        return
    try:
        instance = find_instance(machine.instance)
    except NotThere as error:
        if machine.cpus is None or machine.memory is None:
            hint = error.hint or "for a type that is not in the catalog give `cpus` and `memory` as well"
            what = f"{whose} asks for the instance type `{machine.instance}`, which the catalog does not have"
            report.add(machine, "instance", what, hint, reads=("cpus", "memory"))
        return
    wanted = _PROVIDERS.get(spec.target)
    if wanted and instance.provider != wanted and report.whole("target"):
        what = f"{whose} asks for `{machine.instance}` of {instance.provider}, but target `{spec.target}` is {wanted}"
        report.add(machine, "instance", what, f"choose an instance type of {wanted}")


def _sizes(machine: Machine, whose: str, instance: Instance, report: Report) -> None:
    if instance.flexible or instance.cpus is None or instance.memory_gib is None:
        _sizes_needed(machine, whose, instance, report)
    if instance.flexible:
        _within(machine, whose, instance, report)
    else:
        _agree(machine, whose, instance, report)


def _sizes_needed(machine: Machine, whose: str, instance: Instance, report: Report) -> None:
    missing = [field for field in ("cpus", "memory") if getattr(machine, field) is None]
    if missing:
        why = "comes in any size" if instance.flexible else "has no such figures in the catalog yet"
        what = f"{whose} needs {' and '.join(f'`{each}`' for each in missing)}: `{instance.name}` {why}"
        report.add(machine, "instance", what, "add for example `cpus: 16` and `memory: 128G`", reads=tuple(missing))


def _within(machine: Machine, whose: str, instance: Instance, report: Report) -> None:
    if machine.cpus and instance.cpus and machine.cpus > instance.cpus:
        what = f"{whose} asks for {machine.cpus} cpus, but `{instance.name}` has at most {instance.cpus}"
        report.add(machine, "cpus", what, f"write at most {instance.cpus}", reads=("instance",))
    if machine.memory and instance.memory_gib and machine.memory > instance.memory_gib * 1024:
        what = f"{whose} asks for {_gib(machine.memory)}, but `{instance.name}` has at most {instance.memory_gib:g} GiB"
        report.add(machine, "memory", what, f"write at most {instance.memory_gib:g}G", reads=("instance",))


def _agree(machine: Machine, whose: str, instance: Instance, report: Report) -> None:
    if machine.cpus and instance.cpus and machine.cpus != instance.cpus:
        what = f"{whose} asks for {machine.cpus} cpus, but `{instance.name}` has {instance.cpus}"
        report.add(machine, "cpus", what, "leave `cpus` out; the catalog knows", reads=("instance",))
    if machine.memory and instance.memory_gib and machine.memory != instance.memory_gib * 1024:
        what = f"{whose} asks for {_gib(machine.memory)}, but `{instance.name}` has {instance.memory_gib:g} GiB"
        report.add(machine, "memory", what, "leave `memory` out; the catalog knows", reads=("instance",))


def _gib(mib: int) -> str:
    return f"{mib / 1024:g} GiB"


def _gpus(partition: Partition, report: Report) -> None:
    instance = catalog_instance(partition)
    if instance is None:
        _plain_gpus(partition, report)
        return
    if partition.gpus is not None and partition.gpus != instance.gpus:
        has = str(instance.gpus or "none")
        what = f"partition `{partition.name}` asks for {partition.gpus} gpus per node, but `{instance.name}` has {has}"
        report.add(partition, "gpus", what, _hint_gpus(instance, partition.gpus), reads=("instance",))
    gpu = gpu_of(instance)
    real = gpu.slurm_type if gpu else "no GPU"
    if partition.gpu_type and partition.gpu_type not in (real, instance.gpu):
        what = (
            f"partition `{partition.name}` asks for gpu type `{partition.gpu_type}`, but `{instance.name}` has {real}"
        )
        report.add(partition, "gpu_type", what, "leave `gpu_type` out; the catalog knows", reads=("instance",))


def _hint_gpus(instance: Instance, wanted: int) -> str:
    if not instance.gpus:
        return "leave `gpus` out, or use a type that has some, such as `p5.48xlarge` (8 x H100)"
    other = next((each for each in instances().values() if _is_sister(each, instance) and each.gpus == wanted), None)
    gpu = gpu_of(other) if other else None
    use = f"use `{other.name}` ({other.gpus} x {gpu.slurm_type.upper()}), or " if other and gpu else ""
    return f"{use}set `gpus: {instance.gpus}`"


def _is_sister(one: Instance, other: Instance) -> bool:
    return (one.provider, one.gpu) == (other.provider, other.gpu)


def _plain_gpus(partition: Partition, report: Report) -> None:
    if partition.gpu_type and not partition.gpus:
        what = f"partition `{partition.name}` has a `gpu_type` but no `gpus`"
        report.add(partition, "gpu_type", what, "say how many each node has: `gpus: 8`", reads=("gpus", "instance"))
    elif meant := _misspelt_gpu(partition.gpu_type):
        what = f"partition `{partition.name}` asks for the gpu type `{partition.gpu_type}`, which nobody makes"
        report.add(partition, "gpu_type", what, f"did you mean `{meant}`?")


def _misspelt_gpu(gpu_type: str) -> str:
    """A type we do not know is fine (there are many); one that is a known one in other letters is a slip."""
    bare = gpu_type.removeprefix("nvidia").replace("-", "").replace("_", "").replace("o", "0")
    known = {gpu.slurm_type for gpu in gpus().values()}
    return bare if bare in known and catalog_gpu(gpu_type) is None else ""


def _cloud_needs_instance(partition: Partition, spec: ClusterSpec, report: Report) -> None:
    if spec.target in _PROVIDERS and not partition.instance and report.whole("target"):
        example = "BM.GPU.H100.8" if spec.target == "oci" else "p5.48xlarge"
        what = f"partition `{partition.name}` needs an `instance`: {spec.target} rents machines by type"
        report.add(partition, "instance", what, f"add `instance: {example}`", reads=("nodes_from",))
