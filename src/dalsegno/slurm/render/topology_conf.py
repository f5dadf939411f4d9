"""topology.conf: which nodes hang under which switch."""

from __future__ import annotations

from dalsegno.hostlist import compress
from dalsegno.slurm.layout import Layout
from dalsegno.slurm.render.lines import header, line
from dalsegno.slurm.version import Version
from dalsegno.spec.facts import Cluster, Switch


def render_topology_conf(cluster: Cluster, layout: Layout, slurm: Version) -> str:
    """topology.conf for topology/tree, which every Slurm up to now reads (topology.yaml of 25.05 is another way)."""
    switches = "".join(f"{_switch(switch)}\n" for switch in cluster.slurm.topology)
    return header("topology.conf", cluster.name, layout.spec) + switches


def _switch(switch: Switch) -> str:
    nodes, below = compress(switch.nodes), compress(switch.switches)
    return line({"SwitchName": switch.name, "Nodes": nodes, "Switches": below})
