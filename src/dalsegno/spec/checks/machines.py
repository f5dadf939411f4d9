"""Check machines, partitions and the network topology."""

from __future__ import annotations

from dalsegno.hardware import Instance, closest, did_you_mean, gpu_of, gpus, instances
from dalsegno.hostlist import MAX_NODES
from dalsegno.spec.checks.report import Problems
from dalsegno.spec.layout import (
    catalog_gpu,
    catalog_instance,
    find_cycle,
    find_partition_cycle,
    members,
    own_nodes,
    own_spares,
)
from dalsegno.spec.model import ClusterSpec, MachineSpec, PartitionSpec
from dalsegno.spec.platform_facts import NOT_OFFERED
from dalsegno.spec.section import place
from dalsegno.spec.slurm import SwitchSpec, Topology

_PROVIDERS = {"parallelcluster": "aws", "hyperpod": "aws", "oci": "oci"}


def check_machines(spec: ClusterSpec, report: Problems) -> None:
    """Check the instance types and sizes of the head node and the login nodes, and of the nodes of partitions without
    `nodes_from`."""
    machines: list[tuple[MachineSpec, str]] = [(spec.head, "the head node"), (spec.login, "a login node")]
    own = [partition for partition in spec.partitions if not partition.nodes_from]
    machines += [(partition, f"partition `{partition.name}`") for partition in own]
    for machine, whose in machines:
        _instance(machine, whose, spec, report)
        if instance := catalog_instance(machine):
            _sizes(machine, whose, instance, report)
    for partition in own:
        _gpus(partition, report)
        _cloud_needs_instance(partition, spec, report)


def _instance(machine: MachineSpec, whose: str, spec: ClusterSpec, report: Problems) -> None:
    if not machine.instance:
        return
    instance = catalog_instance(machine)
    unsized = instance is None and (machine.cpus is None or machine.memory is None)
    meant = _meant_type(machine.instance, spec, report) if unsized else ""
    if not meant and (instance is None or instance.provider == "aws") and report.whole("target"):
        _prefix(machine, whose, spec, report)
    if instance is None:
        if unsized:
            sizes = "for a type that is not in the catalog, also give `cpus` and `memory`"
            hint = f"did you mean `{meant}`?" if meant else sizes
            what = f"{whose} has the instance type `{machine.instance}`, which is not in the catalog"
            report.add(machine, "instance", what, hint, reads=("cpus", "memory"))
        return
    wanted = _PROVIDERS.get(spec.target)
    if wanted and instance.provider != wanted and report.whole("target"):
        what = (
            f"{whose} has instance `{machine.instance}` of {instance.provider}, but target `{spec.target}` is {wanted}"
        )
        same = next((each for each in _types(spec.target) if _as_many(each, instance)), None)
        hint = f"use `{_spelled(same.name, spec.target)}`" if same else f"choose an instance type of {wanted}"
        report.add(machine, "instance", what, hint)


def _meant_type(name: str, spec: ClusterSpec, report: Problems) -> str:
    """Return the instance type of the target that `name` probably misspells, as the target writes it, or ""."""
    target = spec.target if report.whole("target") else ""
    meant = closest(name.removeprefix("ml."), [each.name for each in _types(target)])
    return meant and _spelled(meant, target)


def _types(target: str) -> list[Instance]:
    """Return the instance types in the catalog that the target can rent; all of them if it rents none."""
    wanted = _PROVIDERS.get(target)
    there = [each for each in instances().values() if wanted in (None, each.provider)]
    return [each for each in there if target != "hyperpod" or each.name not in NOT_OFFERED]


def _spelled(name: str, target: str) -> str:
    """Return the name of an instance type as the target writes it: HyperPod's names start with `ml.`."""
    return f"ml.{name}" if target == "hyperpod" else name


def _as_many(one: Instance, other: Instance) -> bool:
    return bool(one.gpus) and (one.gpu, one.gpus) == (other.gpu, other.gpus)


def _prefix(machine: MachineSpec, whose: str, spec: ClusterSpec, report: Problems) -> None:
    """Check that an instance type of AWS has the spelling of the target: HyperPod's names start with `ml.`."""
    bare = machine.instance.removeprefix("ml.")
    if spec.target == "hyperpod" and bare == machine.instance:
        what = f"{whose} has the instance type `{bare}`, but the names of HyperPod start with `ml.`"
        report.add(machine, "instance", what, f"write `ml.{bare}`")
    if spec.target == "parallelcluster" and bare != machine.instance:
        what = f"{whose} has the instance type `{machine.instance}`, which is a name of HyperPod"
        report.add(machine, "instance", what, f"write `{bare}`, or set `target: hyperpod`")


def _sizes(machine: MachineSpec, whose: str, instance: Instance, report: Problems) -> None:
    if instance.flexible or instance.cpus is None or instance.memory_gib is None:
        _sizes_needed(machine, whose, instance, report)
    if instance.flexible:
        _within(machine, whose, instance, report)
    else:
        _agree(machine, whose, instance, report)


def _sizes_needed(machine: MachineSpec, whose: str, instance: Instance, report: Problems) -> None:
    missing = [field for field in ("cpus", "memory") if getattr(machine, field) is None]
    if missing:
        why = "comes in any size" if instance.flexible else "has no sizes in the catalog yet"
        what = f"{whose} needs {' and '.join(f'`{each}`' for each in missing)}: `{instance.name}` {why}"
        report.add(machine, "instance", what, "add for example `cpus: 16` and `memory: 128G`", reads=tuple(missing))


def _within(machine: MachineSpec, whose: str, instance: Instance, report: Problems) -> None:
    if machine.cpus and instance.cpus and machine.cpus > instance.cpus:
        what = f"{whose} asks for {machine.cpus} cpus, but `{instance.name}` has at most {instance.cpus}"
        report.add(machine, "cpus", what, f"write at most {instance.cpus}", reads=("instance",))
    if machine.memory and instance.memory_gib and machine.memory > instance.memory_gib * 1024:
        what = f"{whose} asks for {_gib(machine.memory)}, but `{instance.name}` has at most {instance.memory_gib:g} GiB"
        report.add(machine, "memory", what, f"write at most {instance.memory_gib:g}G", reads=("instance",))


def _agree(machine: MachineSpec, whose: str, instance: Instance, report: Problems) -> None:
    if machine.cpus and instance.cpus and machine.cpus != instance.cpus:
        what = f"{whose} asks for {machine.cpus} cpus, but `{instance.name}` has {instance.cpus}"
        report.add(machine, "cpus", what, "leave `cpus` out; it is in the catalog", reads=("instance",))
    if machine.memory and instance.memory_gib and machine.memory != instance.memory_gib * 1024:
        what = f"{whose} asks for {_gib(machine.memory)}, but `{instance.name}` has {instance.memory_gib:g} GiB"
        report.add(machine, "memory", what, "leave `memory` out; it is in the catalog", reads=("instance",))


def _gib(mib: int) -> str:
    return f"{mib / 1024:g} GiB"


def _gpus(partition: PartitionSpec, report: Problems) -> None:
    instance = catalog_instance(partition)
    if instance is None:
        _plain_gpus(partition, report)
        return
    if partition.gpus is not None and partition.gpus != instance.gpus:
        has = str(instance.gpus or "none")
        what = f"partition `{partition.name}` asks for {partition.gpus} gpus per node, but `{instance.name}` has {has}"
        report.add(partition, "gpus", what, _hint_gpus(partition, instance, partition.gpus), reads=("instance",))
    gpu = gpu_of(instance)
    real = gpu.slurm_type if gpu else "no GPU"
    if partition.gpu_type and partition.gpu_type not in (real, instance.gpu):
        what = (
            f"partition `{partition.name}` asks for gpu type `{partition.gpu_type}`, but `{instance.name}` has {real}"
        )
        report.add(partition, "gpu_type", what, "leave `gpu_type` out; it is in the catalog", reads=("instance",))


def _hint_gpus(partition: PartitionSpec, instance: Instance, wanted: int) -> str:
    prefix = "ml." if partition.instance.startswith("ml.") else ""
    if not instance.gpus:
        return f"leave `gpus` out, or use a type that has some, such as `{prefix}p5.48xlarge` (8 x H100)"
    other = next((each for each in instances().values() if _is_sister(each, instance) and each.gpus == wanted), None)
    gpu = gpu_of(other) if other else None
    use = f"use `{prefix}{other.name}` ({other.gpus} x {gpu.slurm_type.upper()}), or " if other and gpu else ""
    return f"{use}set `gpus: {instance.gpus}`"


def _is_sister(one: Instance, other: Instance) -> bool:
    return (one.provider, one.gpu) == (other.provider, other.gpu)


def _plain_gpus(partition: PartitionSpec, report: Problems) -> None:
    if partition.gpu_type and not partition.gpus:
        what = f"partition `{partition.name}` has a `gpu_type` but no `gpus`"
        report.add(
            partition, "gpu_type", what, "add the number of GPUs per node: `gpus: 8`", reads=("gpus", "instance")
        )
    elif meant := _misspelt_gpu(partition.gpu_type):
        what = f"partition `{partition.name}` asks for the gpu type `{partition.gpu_type}`, which does not exist"
        report.add(partition, "gpu_type", what, f"did you mean `{meant}`?")


def _misspelt_gpu(gpu_type: str) -> str:
    """Return the known type that `gpu_type` misspells, or "". Other unknown types are accepted."""
    bare = gpu_type.removeprefix("nvidia").replace("-", "").replace("_", "").replace("o", "0")
    known = {gpu.slurm_type for gpu in gpus().values()}
    return bare if bare in known and catalog_gpu(gpu_type) is None else ""


def _cloud_needs_instance(partition: PartitionSpec, spec: ClusterSpec, report: Problems) -> None:
    if spec.target in _PROVIDERS and not partition.instance and report.whole("target"):
        example = {"oci": "BM.GPU.H100.8", "hyperpod": "ml.p5.48xlarge"}.get(spec.target, "p5.48xlarge")
        what = f"partition `{partition.name}` needs an `instance`: {spec.target} rents machines by type"
        report.add(partition, "instance", what, f"add `instance: {example}`", reads=("nodes_from",))


_OF_THE_MACHINE = ("instance", "cpus", "memory", "gpus", "gpu_type", "features", "weight")


def check_partitions(spec: ClusterSpec, report: Problems) -> None:
    """Check nodes, shared nodes, spares, limits and the default partition."""
    if not spec.partitions and report.whole("partitions"):
        report.add(spec, "partitions", "there is no partition", "add `partitions: [{name: train, nodes: 4}]`")
    for partition in spec.partitions:
        _partition_nodes(partition, spec, report)
        _spares(partition, report)
        _sources(partition, spec, report)
        _times(partition, report)
    _partition_cycle(spec, report)
    _defaults(spec, report)
    _counts(spec, report)
    _total(spec, report)


def _partition_nodes(partition: PartitionSpec, spec: ClusterSpec, report: Problems) -> None:
    if partition.nodes is None and not partition.nodes_from:
        hint = "add `nodes: 4`, or `nodes_from:` with another partition's name"
        report.add(partition, "nodes", f"partition `{partition.name}` has no nodes", hint, reads=("nodes_from",))
    if isinstance(partition.nodes, list) and partition.nodes_from:
        what = f"partition `{partition.name}` names nodes and also takes them from `{partition.nodes_from[0]}`"
        report.add(partition, "nodes", what, "with `nodes_from`, `nodes` must be a number", reads=("nodes_from",))


def _spares(partition: PartitionSpec, report: Problems) -> None:
    if not partition.spares:
        return
    if partition.nodes_from:
        source = partition.nodes_from[0]
        what = f"partition `{partition.name}` cannot have spares: its machines are those of `{source}`"
        report.add(partition, "spares", what, f"give `{source}` the spares", reads=("nodes_from",))
    elif isinstance(partition.nodes, list) and isinstance(partition.spares, int):
        what = f"partition `{partition.name}` names its nodes, but not its spares"
        report.add(partition, "spares", what, "name them too: `spares: gpu[65-66]`", reads=("nodes",))
    elif isinstance(partition.nodes, int) and isinstance(partition.spares, list):
        what = f"partition `{partition.name}` names its spares, but not its nodes"
        report.add(partition, "spares", what, f"write the number: `spares: {len(partition.spares)}`", reads=("nodes",))


def _sources(partition: PartitionSpec, spec: ClusterSpec, report: Problems) -> None:
    names = [each.name for each in spec.partitions]
    for source in partition.nodes_from:
        if source not in names and report.unnamed(source, "partitions"):
            what = f"partition `{partition.name}` takes its nodes from `{source}`, which is not a partition"
            report.add(partition, "nodes_from", what, did_you_mean(source, names, f"partitions: {', '.join(names)}"))
    for field in _OF_THE_MACHINE if partition.nodes_from else ():
        if field in partition.model_fields_set:
            source = partition.nodes_from[0]
            what = f"partition `{partition.name}` cannot set `{field}`: its machines are those of `{source}`"
            report.add(partition, field, what, f"set it in `{source}`", reads=("nodes_from",))


def _times(partition: PartitionSpec, report: Problems) -> None:
    limit, default = partition.time_limit, partition.default_time
    if limit is not None and default is not None and default > limit:
        what = f"`default_time` of partition `{partition.name}` ({default} min) exceeds its `time_limit` ({limit} min)"
        report.add(partition, "default_time", what, "make it shorter, or leave it out", reads=("time_limit",))


def _partition_cycle(spec: ClusterSpec, report: Problems) -> None:
    cycle = find_partition_cycle(spec)
    if cycle:
        first = next(partition for partition in spec.partitions if partition.name == cycle[0])
        names = ", ".join(f"`{name}`" for name in cycle)
        what = f"partitions {names} take their nodes from each other in a cycle"
        if len(cycle) == 1:
            what = f"partition {names} takes its nodes from itself"
        report.add(first, "nodes_from", what, "give one of them `nodes`")


def _defaults(spec: ClusterSpec, report: Problems) -> None:
    defaults = [partition for partition in spec.partitions if partition.default]
    for other in defaults[1:]:
        what = f"partitions `{defaults[0].name}` and `{other.name}` are both default"
        report.add(other, "default", what, "keep `default: true` in one")


def _counts(spec: ClusterSpec, report: Problems) -> None:
    held = members(spec)
    spares = {name for partition in spec.partitions for name in own_spares(partition)}
    if not nodes_known(spec, report):
        return
    for partition in spec.partitions:
        count = sum(name not in spares for name in held[partition.name])
        if count:
            _share(partition, spec, held, report)
            _limits(partition, max(count, _most_on_demand(partition, spec)), report)


def _share(partition: PartitionSpec, spec: ClusterSpec, held: dict[str, list[str]], report: Problems) -> None:
    """Check that `nodes: K` with `nodes_from` is not more than the number of available nodes."""
    there = len({name for source in partition.nodes_from for name in held.get(source, [])})
    if partition.nodes_from and isinstance(partition.nodes, int) and partition.nodes > there:
        sources = ", ".join(f"`{source}`" for source in partition.nodes_from)
        has = "has" if len(partition.nodes_from) == 1 else "have"
        what = f"partition `{partition.name}` takes {partition.nodes} nodes from {sources}, which {has} {there}"
        report.add(partition, "nodes", what, f"write at most `nodes: {there}`, or leave it out for all")


def _most_on_demand(partition: PartitionSpec, spec: ClusterSpec) -> int:
    """Return the number of nodes to which ParallelCluster can grow the partition's queue; 0 without `max_count`."""
    queue = spec.parallelcluster.queues.get(partition.name) if spec.parallelcluster else None
    return (queue and queue.max_count) or 0


def _limits(partition: PartitionSpec, count: int, report: Problems) -> None:
    name, most, least = partition.name, partition.max_nodes, partition.min_nodes
    if most is not None and most > count:
        what = f"`max_nodes` of partition `{name}` is {most}, but it has {count} nodes"
        report.add(partition, "max_nodes", what, f"write at most {count}, or leave it out")
    if least is not None and least > count:
        what = f"`min_nodes` of partition `{name}` is {least}, but it has {count} nodes"
        report.add(partition, "min_nodes", what, f"write at most {count}, or leave it out")
    elif least is not None and most is not None and least > most:
        what = f"`min_nodes` of partition `{name}` ({least}) exceeds its `max_nodes` ({most})"
        report.add(partition, "min_nodes", what, "no job would fit", reads=("max_nodes",))


def _total(spec: ClusterSpec, report: Problems) -> None:
    total = sum(len(own_nodes(partition)) + len(own_spares(partition)) for partition in spec.partitions)
    if total > MAX_NODES:
        report.add(spec, "partitions", f"the cluster has {total:,} nodes", f"Slurm takes at most {MAX_NODES:,}")


def nodes_known(spec: ClusterSpec, report: Problems) -> bool:
    """Return whether the names of all nodes are known, that is, whether all values that determine them are valid."""
    fields = ("name", "nodes", "nodes_from", "spares")
    return report.complete("partitions") and all(
        report.whole(*place(partition), field) for partition in spec.partitions for field in fields
    )


_SHOWN = 4


def check_topology(spec: ClusterSpec, report: Problems) -> None:
    """Check that the switches have no cycle, and that every node is on exactly one leaf switch."""
    topology = spec.slurm.topology
    if topology is None:
        return
    if bool(topology.nodes_per_switch) == bool(topology.switches):
        what = "`slurm.topology` needs either `nodes_per_switch` or `switches`"
        report.add(spec.slurm, "topology", what, "keep one of the two")
    for switch in topology.switches:
        _switch(switch, topology, report)
    _switch_cycle(topology, report)
    if topology.switches and nodes_known(spec, report) and report.complete("slurm", "topology", "switches"):
        _switch_nodes(topology, spec, report)


def _switch(switch: SwitchSpec, topology: Topology, report: Problems) -> None:
    if bool(switch.nodes) == bool(switch.switches):
        what = f"switch `{switch.name}` must name either nodes or switches"
        report.add(switch, "name", what, "a leaf has `nodes`, any other has `switches`", reads=("nodes", "switches"))
    names = [each.name for each in topology.switches]
    for other in switch.switches:
        if other not in names and report.complete("slurm", "topology", "switches"):
            what = f"switch `{switch.name}` is above `{other}`, which is not a switch"
            report.add(switch, "switches", what, did_you_mean(other, names, "add it"))


def _switch_cycle(topology: Topology, report: Problems) -> None:
    cycle = find_cycle({switch.name: switch.switches for switch in topology.switches})
    if cycle:
        first = next(switch for switch in topology.switches if switch.name == cycle[0])
        names = ", ".join(f"`{name}`" for name in cycle)
        report.add(first, "switches", f"switches {names} are above each other in a cycle", "make it a tree")


def _switch_nodes(topology: Topology, spec: ClusterSpec, report: Problems) -> None:
    known = {name for partition in spec.partitions for name in (*own_nodes(partition), *own_spares(partition))}
    leaf_of: dict[str, str] = {}
    for switch in topology.switches:
        unknown = next((name for name in switch.nodes if name not in known), None)
        if unknown:
            what = f"switch `{switch.name}` has the node `{unknown}`, which does not exist"
            report.add(switch, "nodes", what, did_you_mean(unknown, known))
        twice = next((name for name in switch.nodes if name in leaf_of), None)
        if twice:
            what = f"node `{twice}` is on switch `{leaf_of[twice]}` and on `{switch.name}`"
            report.add(switch, "nodes", what, "keep it on one")
        leaf_of |= dict.fromkeys(switch.nodes, switch.name)
    _left_out(known - leaf_of.keys(), topology, report)


def _left_out(names: set[str], topology: Topology, report: Problems) -> None:
    if names:
        shown = ", ".join(f"`{name}`" for name in sorted(names)[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        report.add(topology, "switches", f"no switch has {shown}{more}", "put every node on a leaf switch")
