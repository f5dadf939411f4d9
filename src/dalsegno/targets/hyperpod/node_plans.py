"""The `NodePlan` of each role: what its bootstrap script adds to HyperPod's image. Pure."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

from dalsegno.observe.alert_rules import ALERTS
from dalsegno.observe.dialects import DIALECTS
from dalsegno.observe.monitor_layout import NODE_EXPORTER_PORT, PROMETHEUS_PORT
from dalsegno.observe.prometheus import alert_groups, recording_group, yaml_text
from dalsegno.setup.bootstrap import HOST, PYTHON
from dalsegno.setup.node_plan import (
    NodePlan,
    PlannedCommand,
    PlannedFile,
    PlannedFolder,
    PlannedGroup,
    PlannedService,
    PlannedUser,
)
from dalsegno.spec.facts import Cluster, facts_to_json
from dalsegno.system.hosts import revision
from dalsegno.targets.cloud.node_plans import (
    HEAD_HOME,
    METRICS,
    PATH,
    ManagedSlurm,
    compute_plan,
    head_plan,
    login_plan,
)
from dalsegno.targets.folder import LOGS, ClusterRole
from dalsegno.targets.hyperpod.answers import SlurmRole
from dalsegno.targets.hyperpod.folder import HyperPodStage, HyperPodState
from dalsegno.targets.hyperpod.partitions import DERIVE, MUNGE_KEY
from dalsegno.targets.hyperpod.requests import ENTRY, settings_of
from dalsegno.targets.sides import COMMAND

REFRESH = "/usr/local/sbin/dalsegno-refresh"
EXPORTER_PORT = 9341
FIRST_UID = 10001
WRITER = "dalsegno monitor up"


class HyperPodSlurm(ManagedSlurm):
    """HyperPod's Slurm, whose machines share no folder that only root can change.

    So the secret of a node's agent is derived from munge's key, which HyperPod gives all machines: on the node when it
    is set up, and on the controller when the node appears.
    """

    @property
    def shared(self) -> str:
        return f"{HEAD_HOME}/agents"


def site_of(cluster: Cluster, code: str) -> HyperPodSlurm:
    """Return the site of a cluster. The names of its nodes are known only once they run."""
    own = settings_of(cluster)
    state = HyperPodState(
        HyperPodStage.UP, own.region, own.bucket, own.prefix, controller_group=own.controller_group,
        login_group=own.login_group, role=ClusterRole.HEAD,
    )  # fmt: skip
    return HyperPodSlurm(
        cluster, f"hyperpod-{cluster.name}", code, json.dumps(facts_to_json(state), indent=1), nodes=()
    )


def role_plan(cluster: Cluster, role: SlurmRole, code: str, public_key: str = "", monitored: bool = False) -> NodePlan:
    """Return the plan of the instances of one role. `code` is the key of our code, `public_key` may log in."""
    site = site_of(cluster, code)
    plan = {SlurmRole.CONTROLLER: head_plan, SlurmRole.LOGIN: login_plan, SlurmRole.COMPUTE: compute_plan}[role](site)
    key = "/home/ubuntu/.ssh/authorized_keys"
    files = [PlannedFile(REFRESH, _refresh(cluster), 0o755)]
    if public_key:
        files.append(PlannedFile(key, f"{public_key}\n", 0o600, "ubuntu", "ubuntu", block=True))
    services, packages, folders, commands = [], [], [], []
    if role is SlurmRole.COMPUTE:
        folders.append(PlannedFolder(site.shared, 0o700))
        argv = (PYTHON, "-I", "-c", DERIVE, MUNGE_KEY, cluster.name, HOST, f"{site.shared}/{HOST}")
        commands.append(PlannedCommand("deriving the secret of the node agent", argv, creates=f"{site.shared}/{HOST}"))
    if role is SlurmRole.CONTROLLER:
        services.append(_partition_guard(site))
    if monitored:
        packages.append("prometheus-node-exporter")
        folders.append(PlannedFolder(METRICS))
        files.append(_exporter_options())
        services.append(_node_exporter())
    if monitored and role is SlurmRole.CONTROLLER:
        packages.append("prometheus")
        root = f"{site.folder.root}/prometheus"
        folders += [PlannedFolder(root), PlannedFolder(f"{root}/targets"), PlannedFolder(f"{root}/rules")]
        folders.append(PlannedFolder(f"{root}/data", 0o750, "prometheus", "prometheus"))
        files += [PlannedFile(f"{root}/{name}", text) for name, text in prometheus_files(cluster).items()]
        services += [_slurm_exporter(), _prometheus(cluster, root)]
    return replace(
        plan,
        packages=(*plan.packages, *packages),
        users=tuple(_users(cluster)),
        groups=tuple(_groups(cluster)),
        folders=(*folders, *plan.folders),
        files=(*plan.files, *files),
        commands=(*plan.commands, *commands),
        services=(*plan.services, *services),
    )


def _refresh(cluster: Cluster) -> str:
    """Return the script that gets the lifecycle scripts again and runs them: HyperPod runs them only once."""
    uri = shlex.quote(settings_of(cluster).source_uri)
    return (
        "#!/bin/bash\n# Written by Dal Segno. It gets the newest lifecycle scripts and runs them.\nset -euo pipefail\n"
        'work="$(mktemp -d /var/tmp/dalsegno-refresh.XXXXXX)"\n'
        "trap 'rm -rf \"$work\"' EXIT\n"
        f'aws s3 cp --recursive --only-show-errors {uri} "$work"\n'
        f'bash "$work/{ENTRY}"\n'
    )


def _users(cluster: Cluster) -> list[PlannedUser]:
    """Return the users of the cluster file. All instances give them the same uid, by their order in the file."""
    shared = next((each.mount for each in cluster.storage if each.home), "")
    taken = {user.uid for user in cluster.users if user.uid is not None}
    free = (number for number in range(FIRST_UID, 60000) if number not in taken)
    return [
        PlannedUser(
            user.name,
            user.uid if user.uid is not None else next(free),
            user.full_name,
            f"{shared}/{user.name}" if shared else "",
            ssh_keys=user.ssh_keys,
        )
        for user in cluster.users
    ]


def _groups(cluster: Cluster) -> list[PlannedGroup]:
    """Return the groups of the cluster file. A group without a number must exist on the instances already."""
    numbers = {group.name: group.gid for group in cluster.groups}
    named = dict.fromkeys([*numbers, *(name for user in cluster.users for name in user.groups)])
    return [
        PlannedGroup(name, numbers.get(name), tuple(user.name for user in cluster.users if name in user.groups))
        for name in named
    ]


def _service(name: str, argv: tuple[str, ...], *depends: object) -> PlannedService:
    env = {"PATH": PATH, "LC_ALL": "C.UTF-8", "SLURM_CONF": "/opt/slurm/etc/slurm.conf"}
    return PlannedService(name, argv, f"{LOGS}/{name}.log", env, revision(argv, *depends), keep=True)


def _partition_guard(site: HyperPodSlurm) -> PlannedService:
    program = f"/opt/dalsegno/{site.code}/dalsegno/programs.py"
    argv = (PYTHON, "-I", program, "hyperpod-partitions", str(site.folder.root), "--secrets", site.shared)
    return _service("hyperpod-partitions", argv)


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
    return _service("slurm-exporter", (COMMAND, "exporter", "--open", "--compat", "sckyzo", "--listen", listen))


def _prometheus(cluster: Cluster, root: str) -> PlannedService:
    argv = (
        "/usr/bin/setpriv", "--reuid=prometheus", "--regid=prometheus", "--init-groups", "/usr/bin/prometheus",
        f"--config.file={root}/prometheus.yml", f"--storage.tsdb.path={root}/data",
        f"--storage.tsdb.retention.time={cluster.monitoring.retention_s}s",
        f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}",
    )  # fmt: skip
    return _service("prometheus", argv, *sorted(prometheus_files(cluster).items()))


def prometheus_files(cluster: Cluster) -> dict[str, str]:
    """Return the settings of Prometheus on the controller: it reads all exporters and writes to the workspace of Amazon
    Managed Service for Prometheus that `monitoring.remote_write` names."""
    settings, name = cluster.monitoring, cluster.name
    own = [{"targets": [f"127.0.0.1:{port}"]} for port in (EXPORTER_PORT, NODE_EXPORTER_PORT)]
    slurm, node = ([{**each, "labels": {"instance": "controller", "cluster": name}}] for each in own)
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
    for dialect, rules in DIALECTS.items():
        files[f"rules/names-{dialect}.yml"] = yaml_text(recording_group(dialect, rules, name), name, WRITER)
    return files
