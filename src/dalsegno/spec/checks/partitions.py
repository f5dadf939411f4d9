"""Partitions: their nodes, where they take them from, and their limits."""

from __future__ import annotations

from dalsegno.hardware import did_you_mean
from dalsegno.hostlist import MAX_NODES
from dalsegno.spec.checks.report import Report
from dalsegno.spec.layout import find_circle, members, own_nodes, own_spares
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.partition import Partition
from dalsegno.spec.section import place

_OF_THE_MACHINE = ("instance", "cpus", "memory", "gpus", "gpu_type", "features", "weight")


def check_partitions(spec: ClusterSpec, report: Report) -> None:
    """Nodes, shared nodes, spares, limits, the default."""
    if not spec.partitions and report.whole("partitions"):
        report.add(spec, "partitions", "there is no partition", "add `partitions: [{name: train, nodes: 4}]`")
    for partition in spec.partitions:
        _nodes(partition, spec, report)
        _spares(partition, report)
        _sources(partition, spec, report)
        _times(partition, report)
    _circle(spec, report)
    _defaults(spec, report)
    _counts(spec, report)
    _total(spec, report)


def _nodes(partition: Partition, spec: ClusterSpec, report: Report) -> None:
    if partition.nodes is None and not partition.nodes_from:
        hint = "add `nodes: 4`, or `nodes_from:` with another partition's name"
        report.add(partition, "nodes", f"partition `{partition.name}` has no nodes", hint, reads=("nodes_from",))
    if isinstance(partition.nodes, list) and partition.nodes_from:
        what = f"partition `{partition.name}` names nodes and takes them from `{partition.nodes_from[0]}` as well"
        report.add(partition, "nodes", what, "with `nodes_from`, `nodes` is how many of them", reads=("nodes_from",))


def _spares(partition: Partition, report: Report) -> None:
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
        report.add(partition, "spares", what, f"write how many: `spares: {len(partition.spares)}`", reads=("nodes",))


def _sources(partition: Partition, spec: ClusterSpec, report: Report) -> None:
    names = [each.name for each in spec.partitions]
    for source in partition.nodes_from:
        if source not in names and report.unnamed(source, "partitions"):
            what = f"partition `{partition.name}` takes its nodes from `{source}`, which is no partition"
            report.add(partition, "nodes_from", what, did_you_mean(source, names, f"partitions: {', '.join(names)}"))
    for field in _OF_THE_MACHINE if partition.nodes_from else ():
        if field in partition.model_fields_set:
            source = partition.nodes_from[0]
            what = f"partition `{partition.name}` cannot set `{field}`: its machines are those of `{source}`"
            report.add(partition, field, what, f"set it in `{source}`", reads=("nodes_from",))


def _times(partition: Partition, report: Report) -> None:
    limit, default = partition.time_limit, partition.default_time
    if limit is not None and default is not None and default > limit:
        what = f"`default_time` of partition `{partition.name}` ({default} min) is over its `time_limit` ({limit} min)"
        report.add(partition, "default_time", what, "make it shorter, or leave it out", reads=("time_limit",))


def _circle(spec: ClusterSpec, report: Report) -> None:
    circle = find_circle(spec)
    if circle:
        first = next(partition for partition in spec.partitions if partition.name == circle[0])
        said = ", ".join(f"`{name}`" for name in circle)
        what = f"partitions {said} take their nodes from each other in a circle"
        if len(circle) == 1:
            what = f"partition {said} takes its nodes from itself"
        report.add(first, "nodes_from", what, "let one of them have `nodes`")


def _defaults(spec: ClusterSpec, report: Report) -> None:
    defaults = [partition for partition in spec.partitions if partition.default]
    for other in defaults[1:]:
        what = f"partitions `{defaults[0].name}` and `{other.name}` are both default"
        report.add(other, "default", what, "keep `default: true` in one")


def _counts(spec: ClusterSpec, report: Report) -> None:
    held = members(spec)
    spares = {name for partition in spec.partitions for name in own_spares(partition)}
    if not nodes_known(spec, report):
        return
    for partition in spec.partitions:
        count = sum(name not in spares for name in held[partition.name])
        if count:
            _share(partition, spec, held, report)
            _limits(partition, count, report)


def _share(partition: Partition, spec: ClusterSpec, held: dict[str, list[str]], report: Report) -> None:
    """With `nodes_from`, `nodes: K` must not ask for more than there are."""
    there = len({name for source in partition.nodes_from for name in held.get(source, [])})
    if partition.nodes_from and isinstance(partition.nodes, int) and partition.nodes > there:
        sources = ", ".join(f"`{source}`" for source in partition.nodes_from)
        what = f"partition `{partition.name}` takes {partition.nodes} nodes from {sources}, which has {there}"
        report.add(partition, "nodes", what, f"write at most `nodes: {there}`, or leave it out for all")


def _limits(partition: Partition, count: int, report: Report) -> None:
    name, most, least = partition.name, partition.max_nodes, partition.min_nodes
    if most is not None and most > count:
        what = f"`max_nodes` of partition `{name}` is {most}, but it has {count} nodes"
        report.add(partition, "max_nodes", what, f"write at most {count}, or leave it out")
    if least is not None and least > count:
        what = f"`min_nodes` of partition `{name}` is {least}, but it has {count} nodes"
        report.add(partition, "min_nodes", what, f"write at most {count}, or leave it out")
    elif least is not None and most is not None and least > most:
        what = f"`min_nodes` of partition `{name}` ({least}) is over its `max_nodes` ({most})"
        report.add(partition, "min_nodes", what, "no job would fit", reads=("max_nodes",))


def _total(spec: ClusterSpec, report: Report) -> None:
    total = sum(len(own_nodes(partition)) + len(own_spares(partition)) for partition in spec.partitions)
    if total > MAX_NODES:
        report.add(spec, "partitions", f"the cluster has {total:,} nodes", f"Slurm takes at most {MAX_NODES:,}")


def nodes_known(spec: ClusterSpec, report: Report) -> bool:
    """The names of all nodes can be trusted: nothing that makes them was faulty."""
    fields = ("name", "nodes", "nodes_from", "spares")
    return report.complete("partitions") and all(
        report.whole(*place(partition), field) for partition in spec.partitions for field in fields
    )
