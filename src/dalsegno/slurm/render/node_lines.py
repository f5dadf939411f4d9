"""NodeName lines: nodes that are alike share one, however many they are."""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.hostlist import compress
from dalsegno.slurm.layout import Layout
from dalsegno.slurm.render.lines import Settings, line
from dalsegno.spec.facts import Cluster, Node

SPARE_REASON = "dalsegno:spare"


def node_lines(cluster: Cluster, layout: Layout) -> str:
    groups: dict[tuple[tuple[str, str], ...], list[Node]] = {}
    for node in cluster.nodes:
        groups.setdefault(tuple(_shape(node, layout).items()), []).append(node)
    return "".join(f"{line(_where(nodes, layout) | dict(shape))}\n" for shape, nodes in groups.items())


def _shape(node: Node, layout: Layout) -> Settings:
    """What makes two nodes alike. Slurm drains spares at its start and at each reconfigure, lent ones too."""
    return {
        **_cpus(node, layout),
        "RealMemory": str(node.memory_mib),
        "Gres": _gres(node),
        "Feature": ",".join(node.features),
        "Weight": str(node.weight) if node.weight != 1 else "",
        "State": "DRAIN" if node.spare else "UNKNOWN",
        "Reason": SPARE_REASON if node.spare else "",
    }


def _cpus(node: Node, layout: Layout) -> Settings:
    """Real nodes are only held to their CPU count: a wrong guess at sockets and threads would drain them."""
    if not layout.overrides:
        return {"CPUs": str(node.cpus)}
    sockets = 2 if node.cpus % 2 == 0 and node.cpus >= 16 else 1
    return {"CPUs": str(node.cpus), "Sockets": str(sockets), "CoresPerSocket": str(node.cpus // sockets)}


def _gres(node: Node) -> str:
    if not node.gpus:
        return ""
    return ":".join(part for part in (node.gres, node.gpu_type, str(node.gpus)) if part)


def _where(nodes: Sequence[Node], layout: Layout) -> Settings:
    places = [layout.place(node.name) for node in nodes]
    return {
        "NodeName": compress(node.name for node in nodes),
        "NodeHostname": _one_or_each([place.hostname for place in places]),
        "NodeAddr": _one_or_each([place.address for place in places]),
        "Port": _ports([place.port or layout.slurmd_port for place in places]),
    }


def _one_or_each(values: Sequence[str]) -> str:
    """Slurm takes one value for all the nodes of a line, or as many as there are nodes."""
    return values[0] if len(set(values)) == 1 else compress(values)


def _ports(ports: Sequence[int]) -> str:
    listed = _one_or_each([str(port) for port in ports])
    return f"[{listed}]" if "," in listed and not listed.startswith("[") else listed
