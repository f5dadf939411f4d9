"""Render Prometheus' configuration: scrapes, discovery files, rule files, remote write. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dalsegno.observe.alert_rules import ALERTS, AlertRule
from dalsegno.observe.alertmanager import render_alertmanager
from dalsegno.observe.dialects import DIALECTS, RecordingRule
from dalsegno.observe.monitor_layout import USER, MonitorLayout, NodeTarget
from dalsegno.observe.remote_write import KEPT
from dalsegno.spec.facts import RemoteWrite

CONFIG, TARGETS, ALERTMANAGER = "prometheus.yml", "targets/nodes.json", "alertmanager.yml"
IAM_POLICY = "iam-policy.json"
WRITER = "dalsegno up"  # the command that writes the files of a cluster's own Prometheus
_WORKSPACE = re.compile(r"/workspaces/(ws-[A-Za-z0-9-]+)/")
_MAX_TIMEOUT_S = 10


def monitor_files(layout: MonitorLayout, writer: str = WRITER) -> dict[str, str]:
    """Return the text of every configuration file, by its path in the configuration folder. `writer` is the command
    that writes them."""
    cluster = layout.cluster
    files = {
        CONFIG: render_prometheus(layout, writer),
        TARGETS: render_targets(layout),
        ALERTMANAGER: yaml_text(render_alertmanager(layout.settings), cluster, writer),
        "rules/alerts.yml": yaml_text(alert_groups(ALERTS, cluster), cluster, writer),
    }
    for dialect, rules in DIALECTS.items():
        files[f"rules/names-{dialect}.yml"] = yaml_text(recording_group(dialect, rules, cluster), cluster, writer)
    if layout.settings.remote_write:
        files[IAM_POLICY] = iam_policy(layout.settings.remote_write)
    return files


def render_prometheus(layout: MonitorLayout, writer: str = WRITER) -> str:
    """Return prometheus.yml. Paths in it are relative to its folder, except those of secrets."""
    interval_s = layout.settings.interval_s
    config: dict[str, Any] = {
        "global": {
            "scrape_interval": f"{interval_s}s",
            "scrape_timeout": f"{min(interval_s, _MAX_TIMEOUT_S)}s",
            "evaluation_interval": f"{interval_s}s",
            "external_labels": {"cluster": layout.cluster},
        },
        "rule_files": ["rules/*.yml"],
        "alerting": {
            "alertmanagers": [
                {"basic_auth": _login(layout.password_file), "static_configs": [{"targets": [layout.alertmanager]}]},
            ]
        },
        "scrape_configs": _scrapes(layout),
    }
    if layout.settings.remote_write:
        labels = {"instance": layout.head, "cluster": layout.cluster}
        config["scrape_configs"].append(own_scrape(layout.prometheus, labels, layout.password_file))
        config["remote_write"] = [_remote_write(layout.settings.remote_write)]
    return yaml_text(config, layout.cluster, writer)


def _scrapes(layout: MonitorLayout) -> list[dict[str, Any]]:
    nodes = {"job_name": "node", "basic_auth": _exporter_login(layout), "file_sd_configs": [{"files": [TARGETS]}]}
    if not layout.observer:
        return [nodes]
    bearer = {} if layout.settings.open_metrics else {"authorization": {"credentials_file": layout.token_file}}
    labels = {"instance": layout.head, "cluster": layout.cluster}
    observer = [{"targets": [layout.observer], "labels": labels}]
    return [{"job_name": "dalsegno", **bearer, "static_configs": observer}, nodes]


def own_scrape(address: str, labels: Mapping[str, str], password_file: str) -> dict[str, Any]:
    """Return the job with which Prometheus scrapes its own counters of remote write, and drops its other metrics."""
    return {
        "job_name": "prometheus",
        "static_configs": [{"targets": [address], "labels": dict(labels)}],
        "metric_relabel_configs": [{"source_labels": ["__name__"], "regex": KEPT, "action": "keep"}],
        "basic_auth": _login(password_file),
    }


def _login(password_file: str) -> dict[str, str]:
    return {"username": USER, "password_file": password_file}


def _exporter_login(layout: MonitorLayout) -> dict[str, str]:
    """Return the login for node_exporters. No other program accepts this password, because a user of a node can learn
    it by listening on the port before node_exporter starts."""
    return _login(layout.exporter_password_file)


def _remote_write(to: RemoteWrite) -> dict[str, Any]:
    signing = {"region": to.region, **({"role_arn": to.role_arn} if to.role_arn else {})}
    return {"url": to.url, "sigv4": signing}


def render_targets(layout: MonitorLayout) -> str:
    """Return the discovery file of all node_exporters. Prometheus reads it again whenever it is replaced."""
    found = [{"targets": [node.address], "labels": _labels(layout.cluster, node)} for node in layout.nodes]
    return json.dumps(found, indent=1) + "\n"


def _labels(cluster: str, node: NodeTarget) -> dict[str, str]:
    labels = {
        "instance": node.node,
        "cluster": cluster,
        "partition": node.partition,
        "rack": node.rack,
        "spare": "yes" if node.spare else "",
    }
    return {name: text for name, text in labels.items() if text}


def iam_policy(to: RemoteWrite) -> str:
    """Return the IAM policy that allows Prometheus to write to the workspace."""
    found = _WORKSPACE.search(to.url)
    resource = f"arn:aws:aps:{to.region}:*:workspace/{found[1] if found else '*'}"
    statements = [{"Effect": "Allow", "Action": ["aps:RemoteWrite"], "Resource": resource}]
    return json.dumps({"Version": "2012-10-17", "Statement": statements}, indent=2) + "\n"


def recording_group(dialect: str, rules: Sequence[RecordingRule], cluster: str) -> dict[str, Any]:
    """Return the rule file that provides the metric names of a dialect. Sums drop the label `cluster`, so each
    rule adds it again."""
    found = [
        {"record": rule.record, "expr": rule.expr, "labels": {"cluster": cluster, **rule.labels}} for rule in rules
    ]
    return {"groups": [{"name": f"names-{dialect}", "rules": found}]}


def alert_groups(rules: Sequence[AlertRule], cluster: str) -> dict[str, Any]:
    """Return the rule file with alerts, in a group for each subject."""
    subjects = dict.fromkeys(rule.subject for rule in rules)
    return {
        "groups": [
            {"name": subject, "rules": [_alert(rule, cluster) for rule in rules if rule.subject == subject]}
            for subject in subjects
        ]
    }


def _alert(rule: AlertRule, cluster: str) -> dict[str, Any]:
    return {
        "alert": rule.name,
        "expr": rule.expr,
        **({"for": f"{rule.for_s}s"} if rule.for_s else {}),
        "labels": {"severity": rule.severity.value, "cluster": cluster},
        "annotations": {"summary": rule.summary, "action": rule.action},
    }


def yaml_text(value: Mapping[str, Any], cluster: str, writer: str = WRITER) -> str:
    """Return a value as YAML, with a heading that says which command wrote it."""
    import yaml  # imported late: most commands do not need it

    heading = f"# Written by Dal Segno for cluster {cluster}. `{writer}` writes it again.\n"
    return heading + str(yaml.safe_dump(dict(value), sort_keys=False, width=200, allow_unicode=True))
