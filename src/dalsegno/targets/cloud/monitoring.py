"""Monitoring of a cluster on AWS: node_exporter on every machine, Prometheus and Slurm's exporter on the head. Pure.

Prometheus and node_exporter are packages of Ubuntu, and run as the user `prometheus`. On the head, all three programs
listen on the loopback address only. Prometheus also has the observer's metrics, which users must not read, so it needs
a password. The head generates the password: no script contains it. On the other machines, node_exporter has no
password, because the security group of the cluster lets only its own machines connect.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dalsegno.observe.alert_rules import ALERTS
from dalsegno.observe.dialects import DIALECTS
from dalsegno.observe.missing_data import SLURM_JOB
from dalsegno.observe.monitor_layout import NODE_EXPORTER_PORT, PROMETHEUS_PORT, MonitorLayout, partition_of
from dalsegno.observe.monitor_layout import USER as LOGIN_USER
from dalsegno.observe.prometheus import alert_groups, own_scrape, recording_group, yaml_text
from dalsegno.setup.bootstrap import HEAD, PYTHON
from dalsegno.setup.node_plan import NodePlan, PlannedCommand, PlannedFile, PlannedFolder, PlannedService
from dalsegno.spec.facts import Cluster
from dalsegno.system.hosts import revision
from dalsegno.targets.cloud.node_plans import METRICS, OBSERVER_PORT, PATH, ManagedSlurm
from dalsegno.targets.folder import LOGS
from dalsegno.targets.sides import COMMAND, MonitoredHead, applied_cluster

EXPORTER_PORT = 9341
WRITER = "dalsegno up"
USER = "prometheus"
PROMETHEUS = f"127.0.0.1:{PROMETHEUS_PORT}"
TOKEN, PASSWORD, WEB_CONFIG = "metrics-token", "monitor-password", "monitor-web.yml"
# The observer's metrics about runs, recovery and itself. Slurm's exporter provides those about Slurm.
OBSERVED = "training_.*|dalsegno_(recovery|collector|build)_.*"


class AwsHead(MonitoredHead):
    """The head of a cluster on AWS, whose Prometheus can be queried there."""

    def monitor_layout(self) -> MonitorLayout:
        cluster, password = applied_cluster(self.folder), str(self.folder.secret / PASSWORD)
        return MonitorLayout(cluster.name, "head", (), "", PROMETHEUS, "", "", password, "", cluster.monitoring)


def with_monitoring(plan: NodePlan, site: ManagedSlurm, *, head: bool, nodes: Sequence[str] = ()) -> NodePlan:
    """Return a machine's plan with node_exporter added. The head also gets Prometheus, which reads the exporters of
    `nodes`."""
    packages, folders = ["prometheus-node-exporter"], [PlannedFolder(METRICS)]
    files, services, commands = [], [_node_exporter("127.0.0.1" if head else "")], []
    if head:
        settings, root = prometheus_files(site.cluster, nodes), f"{site.folder.root}/prometheus"
        packages.append("prometheus")
        folders += [PlannedFolder(root), PlannedFolder(f"{root}/targets"), PlannedFolder(f"{root}/rules")]
        folders.append(PlannedFolder(f"{root}/data", 0o750, USER, USER))
        files += [PlannedFile(f"{root}/{name}", text) for name, text in settings.items()]
        services += [_slurm_exporter(), _prometheus(site.cluster, root, settings)]
        commands.append(_drawn_login(site))
        secrets = (WEB_CONFIG, PASSWORD, *([TOKEN] if site.cluster.monitoring.enabled else []))
        commands += [_copied_secret(str(site.folder.secret / name), f"{root}/{name}") for name in secrets]
    own = {folder.path for folder in plan.folders}
    return replace(
        plan,
        packages=(*plan.packages, *packages),
        folders=(*(folder for folder in folders if folder.path not in own), *plan.folders),
        files=(*plan.files, *files),
        commands=(*plan.commands, *commands, _disabled_units(packages)),
        services=(*plan.services, *services),
    )


def _drawn_login(site: ManagedSlurm) -> PlannedCommand:
    """Return the command that generates the password of Prometheus."""
    program = (PYTHON, "-I", f"/opt/dalsegno/{site.code}/dalsegno/programs.py", "web-login")
    password, web = (str(site.folder.secret / name) for name in (PASSWORD, WEB_CONFIG))
    return PlannedCommand("creating the password of Prometheus", (*program, LOGIN_USER, password, web), creates=web)


def _copied_secret(source: str, copy: str) -> PlannedCommand:
    """Return the command that gives Prometheus a copy of a secret file."""
    install = ("/usr/bin/install", "-m", "0400", "-o", USER, "-g", USER, source, copy)
    same = ("/usr/bin/cmp", "-s", source, copy)
    return PlannedCommand(f"giving Prometheus {Path(copy).name}", install, unless=same)


def _disabled_units(packages: Sequence[str]) -> PlannedCommand:
    """Return the command that disables the packages' own units. At the next boot they would take our ports."""
    names = " ".join(packages)
    return PlannedCommand(
        "disabling the units of Prometheus' packages",
        ("/bin/sh", "-c", f"systemctl disable --quiet {names}"),
        unless=("/bin/sh", "-c", f"! systemctl is-enabled --quiet {names} 2> /dev/null"),
    )


def planned_service(name: str, argv: tuple[str, ...], *depends: object) -> PlannedService:
    """Return a service with the environment that Slurm's commands need. The service is restarted if a value of
    `depends` changes."""
    env = {"PATH": PATH, "LC_ALL": "C.UTF-8", "SLURM_CONF": "/opt/slurm/etc/slurm.conf"}
    return PlannedService(name, argv, f"{LOGS}/{name}.log", env, revision(argv, *depends), keep=True)


def _as_user(program: str, *arguments: str) -> tuple[str, ...]:
    as_user = ("/usr/bin/setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups", "--no-new-privs")
    return *as_user, f"/usr/bin/{program}", *arguments


def _node_exporter(address: str) -> PlannedService:
    """Return the service node_exporter, which listens on `address`; "" means all addresses.

    On the head, it listens on the loopback address, because its only reader, Prometheus, runs there.
    """
    options = (f"--collector.textfile.directory={METRICS}", f"--web.listen-address={address}:{NODE_EXPORTER_PORT}")
    return planned_service("node-exporter", _as_user("prometheus-node-exporter", *options))


def _slurm_exporter() -> PlannedService:
    listen = f"127.0.0.1:{EXPORTER_PORT}"
    return planned_service("slurm-exporter", (COMMAND, "exporter", "--open", "--compat", "sckyzo", "--listen", listen))


def _prometheus(cluster: Cluster, root: str, settings: dict[str, str]) -> PlannedService:
    argv = _as_user(
        "prometheus",
        f"--config.file={root}/prometheus.yml",
        f"--storage.tsdb.path={root}/data",
        f"--storage.tsdb.retention.time={cluster.monitoring.retention_s}s",
        f"--web.listen-address={PROMETHEUS}",
        f"--web.config.file={root}/{WEB_CONFIG}",
    )
    # A changed list of targets needs no restart, because Prometheus reads it again by itself.
    return planned_service("prometheus", argv, *sorted(each for each in settings.items() if "targets/" not in each[0]))


def _node_target(cluster: Cluster, node: str) -> dict[str, Any]:
    labels = {"instance": node, "cluster": cluster.name, "partition": partition_of(cluster).get(node, "")}
    return {"targets": [f"{node}:{NODE_EXPORTER_PORT}"], "labels": labels}


def prometheus_files(cluster: Cluster, nodes: Sequence[str] = ()) -> dict[str, str]:
    """Return the settings of Prometheus on the head.

    Prometheus reads the observer, and the exporters of the head and of `nodes`. With `monitoring.remote_write`, it also
    writes to a workspace of Amazon Managed Service for Prometheus.
    """
    settings, name = cluster.monitoring, cluster.name
    labels = {"instance": "head", "cluster": name}
    addresses = (f"127.0.0.1:{EXPORTER_PORT}", f"127.0.0.1:{NODE_EXPORTER_PORT}", f"{HEAD}:{OBSERVER_PORT}")
    slurm, node, observer = ([{"targets": [each], "labels": dict(labels)}] for each in addresses)
    config: dict[str, Any] = {
        "global": {
            "scrape_interval": f"{settings.interval_s}s",
            "evaluation_interval": f"{settings.interval_s}s",
            "external_labels": {"cluster": name},
        },
        "rule_files": ["rules/*.yml"],
        "scrape_configs": [
            {"job_name": SLURM_JOB, "static_configs": slurm},
            {
                "job_name": "node",
                "file_sd_configs": [{"files": ["targets/*.json"]}],
                "static_configs": node,
            },
        ],
    }
    if settings.enabled:
        bearer = {} if settings.open_metrics else {"authorization": {"credentials_file": TOKEN}}
        kept = {"source_labels": ["__name__"], "regex": OBSERVED, "action": "keep"}
        scrape = {"job_name": "dalsegno", **bearer, "static_configs": observer, "metric_relabel_configs": [kept]}
        config["scrape_configs"].append(scrape)
    if settings.remote_write:
        config["scrape_configs"].append(own_scrape(PROMETHEUS, labels, PASSWORD))
        signing = {"region": settings.remote_write.region}
        if settings.remote_write.role_arn:
            signing["role_arn"] = settings.remote_write.role_arn
        config["remote_write"] = [{"url": settings.remote_write.url, "sigv4": signing}]
    files = {
        "prometheus.yml": yaml_text(config, name, WRITER),
        "rules/alerts.yml": yaml_text(alert_groups(ALERTS, name), name, WRITER),
    }
    if nodes:
        files["targets/nodes.json"] = json.dumps([_node_target(cluster, node) for node in nodes], indent=1) + "\n"
    for dialect, rules in DIALECTS.items():
        files[f"rules/names-{dialect}.yml"] = yaml_text(recording_group(dialect, rules, name), name, WRITER)
    return files
