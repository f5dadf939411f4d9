"""Monitoring of a cluster on AWS: node_exporter on every machine, Prometheus and Slurm's exporter on the head. Pure.

The programs are packages of Ubuntu. Prometheus and Slurm's exporter listen on the head's loopback address only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dalsegno.observe.alert_rules import ALERTS
from dalsegno.observe.dialects import DIALECTS
from dalsegno.observe.monitor_layout import NODE_EXPORTER_PORT, PROMETHEUS_PORT, partition_of
from dalsegno.observe.prometheus import alert_groups, recording_group, yaml_text
from dalsegno.setup.node_plan import NodePlan, PlannedFile, PlannedFolder, PlannedService
from dalsegno.spec.facts import Cluster
from dalsegno.system.hosts import revision
from dalsegno.targets.cloud.node_plans import METRICS, PATH, ManagedSlurm
from dalsegno.targets.folder import LOGS
from dalsegno.targets.sides import COMMAND

EXPORTER_PORT = 9341
WRITER = "dalsegno up"


def with_monitoring(plan: NodePlan, site: ManagedSlurm, *, head: bool, nodes: Sequence[str] = ()) -> NodePlan:
    """Return a machine's plan with its exporter and, on the head, with Prometheus, which reads those of `nodes`."""
    packages, folders = ["prometheus-node-exporter"], [PlannedFolder(METRICS)]
    files, services = [_exporter_options()], [_node_exporter()]
    if head:
        settings, root = prometheus_files(site.cluster, nodes), f"{site.folder.root}/prometheus"
        packages.append("prometheus")
        folders += [PlannedFolder(root), PlannedFolder(f"{root}/targets"), PlannedFolder(f"{root}/rules")]
        folders.append(PlannedFolder(f"{root}/data", 0o750, "prometheus", "prometheus"))
        files += [PlannedFile(f"{root}/{name}", text) for name, text in settings.items()]
        services += [_slurm_exporter(), _prometheus(site.cluster, root, settings)]
    own = {folder.path for folder in plan.folders}
    return replace(
        plan,
        packages=(*plan.packages, *packages),
        folders=(*(folder for folder in folders if folder.path not in own), *plan.folders),
        files=(*plan.files, *files),
        services=(*plan.services, *services),
    )


def planned_service(name: str, argv: tuple[str, ...], *depends: object) -> PlannedService:
    """Return a service that uses Slurm. It is restarted if a value of `depends` changes."""
    env = {"PATH": PATH, "LC_ALL": "C.UTF-8", "SLURM_CONF": "/opt/slurm/etc/slurm.conf"}
    return PlannedService(name, argv, f"{LOGS}/{name}.log", env, revision(argv, *depends), keep=True)


def _exporter_options() -> PlannedFile:
    options = f"--collector.textfile.directory={METRICS} --web.listen-address=:{NODE_EXPORTER_PORT}"
    return PlannedFile("/etc/default/prometheus-node-exporter", f'ARGS="{options}"\n')


def _node_exporter() -> PlannedService:
    stamp, unit = revision(_exporter_options().content), "prometheus-node-exporter.service"
    return PlannedService(
        "node-exporter", ("/usr/bin/prometheus-node-exporter",), f"{LOGS}/node-exporter.log", {}, stamp, unit
    )


def _slurm_exporter() -> PlannedService:
    listen = f"127.0.0.1:{EXPORTER_PORT}"
    return planned_service("slurm-exporter", (COMMAND, "exporter", "--open", "--compat", "sckyzo", "--listen", listen))


def _prometheus(cluster: Cluster, root: str, settings: dict[str, str]) -> PlannedService:
    argv = (
        "/usr/bin/setpriv", "--reuid=prometheus", "--regid=prometheus", "--init-groups", "/usr/bin/prometheus",
        f"--config.file={root}/prometheus.yml", f"--storage.tsdb.path={root}/data",
        f"--storage.tsdb.retention.time={cluster.monitoring.retention_s}s",
        f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}",
    )  # fmt: skip
    # Prometheus reads its targets again by itself.
    return planned_service("prometheus", argv, *sorted(each for each in settings.items() if "targets/" not in each[0]))


def _node_target(cluster: Cluster, node: str) -> dict[str, Any]:
    labels = {"instance": node, "cluster": cluster.name, "partition": partition_of(cluster).get(node, "")}
    return {"targets": [f"{node}:{NODE_EXPORTER_PORT}"], "labels": labels}


def prometheus_files(cluster: Cluster, nodes: Sequence[str] = ()) -> dict[str, str]:
    """Return the settings of Prometheus on the head. It reads the exporters of the head and of `nodes`.

    With `monitoring.remote_write`, it also writes to a workspace of Amazon Managed Service for Prometheus.
    """
    settings, name = cluster.monitoring, cluster.name
    own = [{"targets": [f"127.0.0.1:{port}"]} for port in (EXPORTER_PORT, NODE_EXPORTER_PORT)]
    slurm, node = ([{**each, "labels": {"instance": "head", "cluster": name}}] for each in own)
    config: dict[str, Any] = {
        "global": {
            "scrape_interval": f"{settings.interval_s}s",
            "evaluation_interval": f"{settings.interval_s}s",
            "external_labels": {"cluster": name},
        },
        "rule_files": ["rules/*.yml"],
        "scrape_configs": [
            {"job_name": "slurm", "static_configs": slurm},
            {
                "job_name": "node",
                "file_sd_configs": [{"files": ["targets/*.json"]}],
                "static_configs": node,
            },
        ],
    }
    if settings.remote_write:
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
