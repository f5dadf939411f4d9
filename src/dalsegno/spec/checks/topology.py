"""The network's switches: a tree that holds every node once."""

from __future__ import annotations

from dalsegno.hardware import did_you_mean
from dalsegno.spec.checks.partitions import nodes_known
from dalsegno.spec.checks.report import Report
from dalsegno.spec.cycles import find_cycle
from dalsegno.spec.layout import own_nodes, own_spares
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.slurm import Switch, Topology

_SHOWN = 4


def check_topology(spec: ClusterSpec, report: Report) -> None:
    """Switches that are there, and nodes on exactly one leaf."""
    topology = spec.slurm.topology
    if topology is None:
        return
    if bool(topology.nodes_per_switch) == bool(topology.switches):
        what = "`slurm.topology` needs either `nodes_per_switch` or `switches`"
        report.add(spec.slurm, "topology", what, "keep one of the two")
    for switch in topology.switches:
        _switch(switch, topology, report)
    _circle(topology, report)
    if topology.switches and nodes_known(spec, report) and report.complete("slurm", "topology", "switches"):
        _nodes(topology, spec, report)


def _switch(switch: Switch, topology: Topology, report: Report) -> None:
    if bool(switch.nodes) == bool(switch.switches):
        what = f"switch `{switch.name}` must name either nodes or switches"
        report.add(switch, "name", what, "a leaf has `nodes`, any other has `switches`", reads=("nodes", "switches"))
    names = [each.name for each in topology.switches]
    for other in switch.switches:
        if other not in names and report.complete("slurm", "topology", "switches"):
            what = f"switch `{switch.name}` is above `{other}`, which is no switch"
            report.add(switch, "switches", what, did_you_mean(other, names, "add it"))


def _circle(topology: Topology, report: Report) -> None:
    circle = find_cycle({switch.name: switch.switches for switch in topology.switches})
    if circle:
        first = next(switch for switch in topology.switches if switch.name == circle[0])
        said = ", ".join(f"`{name}`" for name in circle)
        report.add(first, "switches", f"switches {said} are above each other in a circle", "make it a tree")


def _nodes(topology: Topology, spec: ClusterSpec, report: Report) -> None:
    known = {name for partition in spec.partitions for name in (*own_nodes(partition), *own_spares(partition))}
    leaf_of: dict[str, str] = {}
    for switch in topology.switches:
        strange = next((name for name in switch.nodes if name not in known), None)
        if strange:
            what = f"switch `{switch.name}` holds the node `{strange}`, which is not there"
            report.add(switch, "nodes", what, did_you_mean(strange, known))
        twice = next((name for name in switch.nodes if name in leaf_of), None)
        if twice:
            what = f"node `{twice}` is on switch `{leaf_of[twice]}` and on `{switch.name}`"
            report.add(switch, "nodes", what, "keep it on one")
        leaf_of |= dict.fromkeys(switch.nodes, switch.name)
    _left_out(known - leaf_of.keys(), topology, report)


def _left_out(names: set[str], topology: Topology, report: Report) -> None:
    if names:
        shown = ", ".join(f"`{name}`" for name in sorted(names)[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        report.add(topology, "switches", f"no switch holds {shown}{more}", "put every node on a leaf switch")
