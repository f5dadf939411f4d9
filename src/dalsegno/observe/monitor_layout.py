"""The addresses, labels and secret files of a cluster's monitoring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dalsegno.spec.facts import Cluster, Monitoring

USER = "dalsegno"  # the user name for Prometheus, Alertmanager and node_exporter; the password is in a file
ENABLE = "remove `monitoring: {enabled: false}` from the cluster file, then run `dalsegno up`"
PROMETHEUS_PORT, ALERTMANAGER_PORT, NODE_EXPORTER_PORT = 9090, 9093, 9100


@dataclass(frozen=True)
class NodeTarget:
    """The node_exporter of one host. The head has neither partition nor rack."""

    node: str
    address: str  # host:port of node_exporter
    partition: str = ""
    rack: str = ""
    spare: bool = False


@dataclass(frozen=True)
class MonitorLayout:
    """The values from which the configuration of Prometheus and Alertmanager is rendered.

    On the head of a cluster in a cloud there is no Alertmanager, and only the address and the password of Prometheus
    are known: all other addresses and files are "".
    """

    cluster: str
    head: str
    nodes: tuple[NodeTarget, ...]
    observer: str  # host:port of the observer, which serves /metrics
    prometheus: str  # host:port of Prometheus
    alertmanager: str  # host:port of Alertmanager
    token_file: str  # the file with the bearer token for the observer
    password_file: str  # the file with the password of `USER` at Prometheus and Alertmanager
    exporter_password_file: str  # the file with the password of `USER` at node_exporters
    settings: Monitoring = field(default_factory=Monitoring)


def partition_of(cluster: Cluster) -> Mapping[str, str]:
    """Return the partition of each node: the first one in the cluster file that contains it."""
    found: dict[str, str] = {}
    for partition in cluster.partitions:
        for node in partition.nodes:
            found.setdefault(node, partition.name)
    return found


def rack_of(cluster: Cluster) -> Mapping[str, str]:
    """Return the leaf switch of each node, which is used as its rack."""
    return {node: switch.name for switch in cluster.slurm.topology for node in switch.nodes}
