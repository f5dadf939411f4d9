"""Monitoring of a local cluster: the addresses, files and services of Prometheus, Alertmanager and node_exporter.

The programs come from the distribution's packages and run on the cluster's hosts. All of them require a password,
because users of the cluster can reach their ports. Only the cluster's owner can read the password's file. node_exporter
has a separate password.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from shlex import quote

from dalsegno.errors import TargetError
from dalsegno.observe.alertmanager import secret_files
from dalsegno.observe.monitor_layout import (
    ALERTMANAGER_PORT,
    NODE_EXPORTER_PORT,
    PROMETHEUS_PORT,
    USER,
    MonitorLayout,
    NodeTarget,
    partition_of,
    rack_of,
)
from dalsegno.observe.prometheus import ALERTMANAGER, CONFIG, TARGETS, monitor_files
from dalsegno.spec.facts import Cluster
from dalsegno.system.files import make_folder
from dalsegno.system.hosts import Service, revision
from dalsegno.system.machine import program
from dalsegno.system.ownership import trusted_owners
from dalsegno.system.passwords import make_web_login
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.placement import LOOPBACK, OBSERVER, OBSERVER_PORT, Placement, exporter_port

PROGRAMS = {  # service -> program of the distribution's packages
    "prometheus": "prometheus",
    "alertmanager": "prometheus-alertmanager",
    "node-exporter": "prometheus-node-exporter",
}
NODE_EXPORTER = "node-exporter"


def monitor_layout(cluster: Cluster, folder: Folder, placement: Placement) -> MonitorLayout:
    """Return the addresses and files of the monitoring programs, whether they run or not."""
    head, ports = cluster.head, placement.ports
    address = placement.addresses[head]
    partitions, racks = partition_of(cluster), rack_of(cluster)
    spares = {node.name for node in cluster.nodes if node.spare}
    exporters = [NodeTarget(head, f"{address}:{ports.get(exporter_port(head), NODE_EXPORTER_PORT)}")]
    for node in cluster.nodes:
        at = f"{placement.addresses[node.name]}:{ports.get(exporter_port(node.name), NODE_EXPORTER_PORT)}"
        rack = racks.get(node.name, "")
        exporters.append(NodeTarget(node.name, at, partitions.get(node.name, ""), rack, node.name in spares))
    return MonitorLayout(
        cluster=cluster.name,
        head=head,
        nodes=tuple(exporters),
        observer=f"{address}:{ports.get(OBSERVER, OBSERVER_PORT)}" if cluster.monitoring.enabled else "",
        prometheus=f"{address}:{ports.get('prometheus', PROMETHEUS_PORT)}",
        alertmanager=f"{address}:{ports.get('alertmanager', ALERTMANAGER_PORT)}",
        token_file=str(folder.metrics_token),
        password_file=str(folder.monitor_password),
        exporter_password_file=str(folder.exporter_password),
        settings=cluster.monitoring,
    )


@dataclass(frozen=True)
class MonitorServices:
    """Defines the monitoring services of each host."""

    cluster: Cluster
    folder: Folder
    layout: MonitorLayout
    files: Mapping[str, str]
    loopback: bool
    env: Mapping[str, str]

    def head(self) -> list[Service]:
        """Return the services of the head."""
        own = self._exporter(self.cluster.head, ["--collector.processes"])
        return [self._prometheus(), self._alertmanager(), own]

    def compute(self, node: str, host: str) -> list[Service]:
        """Return node_exporter for a node. On loopback ports it serves only the metrics of the node's agent, because
        the node_exporter of the head already serves the machine's metrics."""
        few = ["--collector.disable-defaults", "--collector.textfile"]
        collectors = few if self.loopback else ["--collector.processes"]
        service = self._exporter(
            node, [*collectors, f"--collector.textfile.directory={self.folder.node_metrics(node)}"]
        )
        return [service if node == host else replace(service, name=f"{NODE_EXPORTER}:{node}")]

    def _prometheus(self) -> Service:
        settings = [
            text for name, text in sorted(self.files.items()) if name != TARGETS
        ]  # the targets are left out, because a change to them needs no restart
        at, data = self.layout.prometheus, self.folder.monitor / "data/prometheus"
        arguments = [
            f"--config.file={self.folder.monitor / CONFIG}", f"--storage.tsdb.path={data}",
            f"--storage.tsdb.retention.time={self.layout.settings.retention_s}s", f"--web.listen-address={at}",
            f"--web.external-url=http://{at}/", "--log.level=warn", self._web_config,
        ]  # fmt: skip
        return self._service("prometheus", arguments, self.cluster.head, settings)

    def _alertmanager(self) -> Service:
        at, data = self.layout.alertmanager, self.folder.monitor / "data/alertmanager"
        arguments = [
            f"--config.file={self.folder.monitor / ALERTMANAGER}", f"--storage.path={data}",
            f"--web.listen-address={at}", f"--web.external-url=http://{at}/", "--cluster.listen-address=",
            "--log.level=warn", self._web_config,
        ]  # fmt: skip
        return self._service("alertmanager", arguments, self.cluster.head, [self.files[ALERTMANAGER]])

    def _exporter(self, host: str, arguments: Sequence[str]) -> Service:
        at = next(node.address for node in self.layout.nodes if node.node == host)
        common = [
            f"--web.listen-address={at}",
            "--log.level=warn",
            f"--web.config.file={self.folder.exporter_web_config}",
        ]
        return self._service(NODE_EXPORTER, [*common, *arguments], host, [])

    @property
    def _web_config(self) -> str:
        return f"--web.config.file={self.folder.monitor_web_config}"

    def _service(self, name: str, arguments: Sequence[str], host: str, depends: Sequence[str]) -> Service:
        binary = PROGRAMS[name]
        argv = (program(binary) or binary, *arguments)
        log = str(self.folder.log(host, name))
        return Service(name, argv, self.env, log, revision(argv, sorted(self.env.items()), *depends), keep=True)


def monitor_services(
    cluster: Cluster, folder: Folder, placement: Placement, env: Mapping[str, str]
) -> MonitorServices | None:
    """Return the monitoring services; None if the cluster has no Prometheus."""
    if not cluster.monitoring.prometheus:
        return None
    layout = monitor_layout(cluster, folder, placement)
    loopback = placement.hosts == LOOPBACK
    return MonitorServices(cluster, folder, layout, monitor_files(layout), loopback, env)


def make_monitor_folders(folder: Folder) -> None:
    """Create the folders and the passwords of the monitoring programs."""
    for path in (folder.monitor, folder.monitor / "data", folder.monitor / "targets", folder.monitor / "rules"):
        make_folder(path, 0o700)
    make_web_login(USER, folder.monitor_password, folder.monitor_web_config)
    make_web_login(USER, folder.exporter_password, folder.exporter_web_config)


def check_secret_files(cluster: Cluster) -> None:
    """Raise TargetError if a secret file that the cluster file names cannot be read, or is open to other users."""
    for name in secret_files(cluster.monitoring):
        try:
            about = os.stat(name)
        except OSError as error:
            raise TargetError(
                f"`monitoring.alerts` names {name}, which cannot be read: {error.strerror}",
                hint=f"write the secret to it, then `chmod 600 {quote(name)}`",
            ) from error
        if not stat.S_ISREG(about.st_mode) or about.st_uid not in trusted_owners() or about.st_mode & 0o077:
            raise TargetError(
                f"other users may read or own {name}, which holds a secret of `monitoring.alerts`",
                hint=f"make it your own: `chown $(id -un) {quote(name)} && chmod 600 {quote(name)}`",
            )
