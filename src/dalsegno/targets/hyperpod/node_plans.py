"""What an instance of each role gets beyond HyperPod's image, as a `NodePlan` that becomes its bootstrap script. Pure."""

from __future__ import annotations

import json
import shlex
from typing import Any

from dalsegno.observe.alert_rules import ALERTS
from dalsegno.observe.dialects import DIALECTS
from dalsegno.observe.monitor_layout import NODE_EXPORTER_PORT
from dalsegno.observe.prometheus import alert_groups, recording_group, yaml_text
from dalsegno.setup.bootstrap import HEAD, HOST, PYTHON
from dalsegno.setup.node_plan import (
    NodePlan,
    PlannedCommand,
    PlannedFile,
    PlannedFolder,
    PlannedLink,
    PlannedService,
    PlannedUser,
)
from dalsegno.spec.facts import Cluster, facts_to_json
from dalsegno.system.hosts import revision
from dalsegno.targets.hyperpod.answers import SlurmRole
from dalsegno.targets.hyperpod.partitions import CONF, PATH
from dalsegno.targets.hyperpod.requests import ENTRY, settings_of

HOME = "/var/lib/dalsegno"
LOGS = "/var/log/dalsegno"
METRICS = f"{HOME}/metrics"  # files that node_exporter serves, with the GPU metrics of the node agent
REFRESH = "/usr/local/sbin/dalsegno-refresh"
EXPORTER_PORT, PROMETHEUS_PORT = 9341, 9090
FIRST_UID = 10001


def role_plan(cluster: Cluster, role: SlurmRole, code: str, public_key: str = "", monitored: bool = False) -> NodePlan:
    """Return the plan of the instances of one role. `code` is the key of our code, `public_key` may log in."""
    controller = role is SlurmRole.CONTROLLER
    services = [] if role is SlurmRole.LOGIN else [_node_agent(cluster)] if not controller else []
    if controller:
        services.append(_partition_guard(cluster, code))
    packages: tuple[str, ...] = ()
    files = [
        PlannedFile("/usr/local/bin/dalsegno", _command(), 0o755),
        PlannedFile(REFRESH, _refresh(cluster), 0o755),
    ]
    folders = [PlannedFolder(LOGS), PlannedFolder(HOME), PlannedFolder(METRICS)]
    if public_key:
        files.append(PlannedFile("/home/ubuntu/.ssh/authorized_keys", f"{public_key}\n", 0o600, "ubuntu", "ubuntu", True))
    if controller:
        root = cluster_folder(cluster)
        folders += [PlannedFolder(f"{HOME}/clusters"), PlannedFolder(root)]
        files.append(PlannedFile(f"{root}/cluster.json", json.dumps(facts_to_json(cluster), indent=1)))
    if monitored:
        packages += ("prometheus-node-exporter",)
        files.append(_exporter_options())
        services.append(_node_exporter())
    if monitored and controller:
        packages += ("prometheus",)
        root = f"{cluster_folder(cluster)}/prometheus"
        folders += [PlannedFolder(root), PlannedFolder(f"{root}/targets"), PlannedFolder(f"{root}/rules")]
        folders.append(PlannedFolder(f"{root}/data", 0o750, "prometheus", "prometheus"))
        files += [PlannedFile(f"{root}/{name}", text) for name, text in prometheus_files(cluster).items()]
        services += [_slurm_exporter(), _prometheus(cluster, root)]
    secret = PlannedCommand(
        "creating the agent's secret",
        ("/bin/sh", "-c", f"umask 077; head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n' > {_SECRET}"),
        creates=_SECRET,
    )
    return NodePlan(
        cluster.name,
        f"hyperpod-{cluster.name}",
        HOST,
        packages=packages,
        users=tuple(_users(cluster)),
        folders=tuple(folders),
        files=tuple(files),
        links=(PlannedLink("/opt/dalsegno/current", code),),
        bundle=code,
        python=PYTHON,
        commands=(secret,) if role is SlurmRole.COMPUTE and services else (),
        services=tuple(services),
    )


_SECRET = f"{HOME}/agent-secret"
AGENTS_PORT = 6820


def cluster_folder(cluster: Cluster) -> str:
    """Return the folder of the cluster on its controller."""
    return f"{HOME}/clusters/{cluster.name}"


def _command() -> str:
    return (
        f"#!{PYTHON} -I\n# Written by Dal Segno.\nimport sys\n\n"
        'sys.path[:0] = ["/opt/dalsegno/current"]\n'
        "from dalsegno.cli.main import main\n\nmain()\n"
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
    shared = next((each.mount for each in cluster.storage if each.home), "")
    taken = {user.uid for user in cluster.users if user.uid is not None}
    free = (number for number in range(FIRST_UID, 60000) if number not in taken)
    return [
        PlannedUser(
            user.name,
            user.uid if user.uid is not None else next(free),
            user.groups,
            f"{shared}/{user.name}" if shared else "",
            ssh_keys=user.ssh_keys,
        )
        for user in cluster.users
    ]


def _service(name: str, argv: tuple[str, ...], *depends: object) -> PlannedService:
    env = {"PATH": PATH, "LC_ALL": "C.UTF-8", "SLURM_CONF": CONF}
    return PlannedService(name, argv, f"{LOGS}/{name}.log", env, revision(argv, *depends), keep=True)


def _program(name: str, *arguments: str) -> tuple[str, ...]:
    return (PYTHON, "-I", "/opt/dalsegno/current/dalsegno/programs.py", name, *arguments)


def _partition_guard(cluster: Cluster, code: str) -> PlannedService:
    return _service("hyperpod-partitions", _program("hyperpod-partitions", cluster_folder(cluster)), code)


def _node_agent(cluster: Cluster) -> PlannedService:
    """Return the node agent: it checks the node and writes the metrics of its GPUs. It works without a controller."""
    arguments = ("--node", HOST, "--controller", f"{HEAD}:{AGENTS_PORT}", "--secret", _SECRET)
    boot = ("--boot-id", "/proc/sys/kernel/random/boot_id", "--metrics", METRICS)
    return _service("node-agent", _program("node-agent", *arguments, *boot))


def _exporter_options() -> PlannedFile:
    options = f"--collector.textfile.directory={METRICS} --web.listen-address=:{NODE_EXPORTER_PORT}"
    return PlannedFile("/etc/default/prometheus-node-exporter", f'ARGS="{options}"\n')


def _node_exporter() -> PlannedService:
    argv = ("/usr/bin/prometheus-node-exporter",)
    unit = "prometheus-node-exporter.service"
    return PlannedService("node-exporter", argv, f"{LOGS}/node-exporter.log", {}, revision(_exporter_options().content), unit)


def _slurm_exporter() -> PlannedService:
    argv = ("/usr/local/bin/dalsegno", "exporter", "--open", "--compat", "sckyzo", "--listen", f"127.0.0.1:{EXPORTER_PORT}")
    return _service("slurm-exporter", argv)


def _prometheus(cluster: Cluster, root: str) -> PlannedService:
    retention = f"{cluster.monitoring.retention_s}s"
    argv = (
        "/usr/bin/setpriv", "--reuid=prometheus", "--regid=prometheus", "--init-groups", "/usr/bin/prometheus",
        f"--config.file={root}/prometheus.yml", f"--storage.tsdb.path={root}/data",
        f"--storage.tsdb.retention.time={retention}", f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}",
    )  # fmt: skip
    return _service("prometheus", argv, *sorted(prometheus_files(cluster).items()))


def prometheus_files(cluster: Cluster) -> dict[str, str]:
    """Return the settings of Prometheus on the controller: it reads all exporters and writes to the workspace of Amazon
    Managed Service for Prometheus that `monitoring.remote_write` names."""
    settings, name = cluster.monitoring, cluster.name
    labels = {"instance": "controller", "cluster": name}
    config: dict[str, Any] = {
        "global": {
            "scrape_interval": f"{settings.interval_s}s",
            "evaluation_interval": f"{settings.interval_s}s",
            "external_labels": {"cluster": name},
        },
        "rule_files": ["rules/*.yml"],
        "scrape_configs": [
            {
                "job_name": "slurm",
                "static_configs": [{"targets": [f"127.0.0.1:{EXPORTER_PORT}"], "labels": labels}],
            },
            {
                "job_name": "node",
                "file_sd_configs": [{"files": ["targets/*.json"]}],
                "static_configs": [{"targets": [f"127.0.0.1:{NODE_EXPORTER_PORT}"], "labels": labels}],
            },
        ],
    }
    if settings.remote_write:
        signing = {"region": settings.remote_write.region}
        if settings.remote_write.role_arn:
            signing["role_arn"] = settings.remote_write.role_arn
        config["remote_write"] = [{"url": settings.remote_write.url, "sigv4": signing}]
    files = {
        "prometheus.yml": yaml_text(config, name, "dalsegno monitor up"),
        "rules/alerts.yml": yaml_text(alert_groups(ALERTS, name), name, "dalsegno monitor up"),
    }
    for dialect, rules in DIALECTS.items():
        text = yaml_text(recording_group(dialect, rules, name), name, "dalsegno monitor up")
        files[f"rules/names-{dialect}.yml"] = text
    return files
