"""Monitoring of a cluster on ssh hosts: Prometheus and Alertmanager on the head, and node_exporter. Pure.

node_exporter runs on the head and on every node, but not on login nodes. The programs come from the distribution's
packages, and run as the user `prometheus`. All of them require a password, because users of the cluster can reach their
ports. The programs can write only to their data folder and to the files with passwords, which only they and root can
read. Root owns all other files.
"""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.observe.monitor_layout import (
    ALERTMANAGER_PORT,
    NODE_EXPORTER_PORT,
    PROMETHEUS_PORT,
    MonitorLayout,
    NodeTarget,
    partition_of,
    rack_of,
)
from dalsegno.observe.prometheus import ALERTMANAGER, CONFIG, TARGETS, monitor_files
from dalsegno.setup.node_plan import HostParts, PlannedCommand, PlannedFile, PlannedFolder, PlannedService
from dalsegno.spec.facts import Cluster
from dalsegno.system.hosts import revision
from dalsegno.targets.folder import LOGS
from dalsegno.targets.ssh.folder import ClusterSecrets, SshFolder
from dalsegno.targets.ssh.services import OBSERVER_PORT, PATH

USER = "prometheus"
HEAD_PACKAGES = ("prometheus", "prometheus-alertmanager")
NODE_PACKAGES = ("prometheus-node-exporter",)
MONITOR_PORTS = (PROMETHEUS_PORT, ALERTMANAGER_PORT, NODE_EXPORTER_PORT)
EXPORTER = "node-exporter"


def monitor_layout(cluster: Cluster, folder: SshFolder) -> MonitorLayout:
    """Return the addresses and files of the monitoring programs, whether they run or not."""
    addresses = {host.name: host.address for host in cluster.ssh.hosts}
    partitions, racks = partition_of(cluster), rack_of(cluster)
    spares = {node.name for node in cluster.nodes if node.spare}
    nodes = [
        NodeTarget(name, f"{addresses[name]}:{NODE_EXPORTER_PORT}", partitions.get(name, ""), racks.get(name, ""),
                   name in spares)
        for name in (cluster.head, *(node.name for node in cluster.nodes))
    ]  # fmt: skip
    head = addresses[cluster.head]
    return MonitorLayout(
        cluster=cluster.name,
        head=cluster.head,
        nodes=tuple(nodes),
        observer=f"{head}:{OBSERVER_PORT}" if cluster.monitoring.enabled else "",
        prometheus=f"{head}:{PROMETHEUS_PORT}",
        alertmanager=f"{head}:{ALERTMANAGER_PORT}",
        token_file=str(folder.monitor / "metrics-token"),
        password_file=str(folder.monitor / "password"),
        exporter_password_file=str(folder.monitor / "exporter-password"),
        settings=cluster.monitoring,
    )


def monitor_parts(
    layout: MonitorLayout, host: str, secrets: ClusterSecrets, *, folder: SshFolder, systemd: bool
) -> HostParts:
    """Return the parts of a host's plan for monitoring. Login nodes have none."""
    found = next((node for node in layout.nodes if node.node == host), None)
    if found is None:
        return HostParts()
    parts = _exporter(found, secrets, folder)
    if host == layout.head:
        parts = _head(layout, secrets, folder) + parts
    names = " ".join(parts.packages)
    disable = PlannedCommand(  # otherwise the packages' own services would start at the next boot, on the same ports
        "disabling the units of Prometheus' packages",
        ("/bin/sh", "-c", f"systemctl disable --quiet {names}"),
        unless=("/bin/sh", "-c", f"! systemctl is-enabled --quiet {names}"),
    )
    return parts + HostParts(commands=(disable,)) if systemd else parts


def _exporter(node: NodeTarget, secrets: ClusterSecrets, folder: SshFolder) -> HostParts:
    config = folder.monitor / "exporter-web.yml"
    arguments = [f"--web.listen-address={node.address}", "--log.level=warn", f"--web.config.file={config}"]
    arguments += ["--collector.processes", f"--collector.textfile.directory={folder.node_metrics}"]
    service = _service(EXPORTER, NODE_PACKAGES[0], arguments, [secrets.exporter_web])
    return HostParts(
        NODE_PACKAGES,
        (PlannedFolder(str(folder.monitor), 0o750, group=USER), PlannedFolder(str(folder.node_metrics))),
        (_secret(str(config), secrets.exporter_web),),
        services=(service,),
    )


def _head(layout: MonitorLayout, secrets: ClusterSecrets, folder: SshFolder) -> HostParts:
    files, base = monitor_files(layout), folder.monitor
    secret = {
        "web.yml": secrets.monitor_web,
        "password": secrets.monitor_password,
        "exporter-password": secrets.exporter_password,
        "metrics-token": secrets.metrics_token,
        ALERTMANAGER: files[ALERTMANAGER],  # the addresses of webhooks often contain a token
    }
    plain = {name: text for name, text in files.items() if name not in secret}
    texts = {**plain, **secret}
    settings = [text for name, text in sorted(texts.items()) if name != TARGETS]  # changed targets need no restart
    data = base / "data"
    web = f"--web.config.file={base / 'web.yml'}"
    prometheus = [
        f"--config.file={base / CONFIG}", f"--storage.tsdb.path={data / 'prometheus'}",
        f"--storage.tsdb.retention.time={layout.settings.retention_s}s", f"--web.listen-address={layout.prometheus}",
        f"--web.external-url=http://{layout.prometheus}/", "--log.level=warn", web,
    ]  # fmt: skip
    alertmanager = [
        f"--config.file={base / ALERTMANAGER}", f"--storage.path={data / 'alertmanager'}",
        f"--web.listen-address={layout.alertmanager}", f"--web.external-url=http://{layout.alertmanager}/",
        "--cluster.listen-address=", "--log.level=warn", web,
    ]  # fmt: skip
    return HostParts(
        HEAD_PACKAGES,
        (
            *(PlannedFolder(str(base / name), 0o750, group=USER) for name in ("targets", "rules")),
            PlannedFolder(str(data), 0o700, USER, USER),
        ),
        (
            *(PlannedFile(str(base / name), text, 0o640, group=USER) for name, text in plain.items()),
            *(_secret(str(base / name), text) for name, text in secret.items()),
        ),
        services=(
            _service("prometheus", HEAD_PACKAGES[0], prometheus, settings),
            _service("alertmanager", HEAD_PACKAGES[1], alertmanager, [files[ALERTMANAGER], secrets.monitor_web]),
        ),
    )


def _secret(path: str, text: str) -> PlannedFile:
    return PlannedFile(path, text, 0o600, USER, USER, secret=True)


def _service(name: str, program: str, arguments: Sequence[str], depends: Sequence[str]) -> PlannedService:
    user = ("/usr/bin/setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups", "--no-new-privs")
    argv, env = (*user, f"/usr/bin/{program}", *arguments), {"PATH": PATH, "LC_ALL": "C.UTF-8"}
    return PlannedService(name, argv, f"{LOGS}/{name}.log", env, revision(argv, *depends), keep=True)
