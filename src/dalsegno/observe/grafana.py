"""The files that start Grafana with our dashboards: JSON, provisioning, and a compose file. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dalsegno.observe.dashboards import DASHBOARDS
from dalsegno.observe.monitor_layout import USER
from dalsegno.observe.panels import DATASOURCE_UID, dashboard_json
from dalsegno.observe.prometheus import yaml_text

VERSION = "11.4.0"
IMAGE = f"grafana/grafana:{VERSION}"
# Names of the files with passwords, and of the secrets in the compose file
PASSWORD, ADMIN_PASSWORD = "prometheus-password", "admin-password"
WRITER = "dalsegno dashboards export"
DASHBOARD_FOLDER = "/var/lib/grafana/dashboards"


def grafana_files(cluster: str, prometheus: str, *, login: bool) -> dict[str, str]:
    """Return the text of each file by its path. `login` says whether the Prometheus at this address has a password."""
    return _files(cluster, _datasource(f"http://{prometheus}", login), _compose(login))


def workspace_files(cluster: str, url: str, region: str) -> dict[str, str]:
    """Return the files of `grafana_files`, but for a workspace of Amazon Managed Service for Prometheus.

    `url` is the workspace's address for remote write. Grafana signs its requests with the AWS credentials of the user
    who starts Grafana.
    """
    source, compose = _datasource(url.removesuffix("/api/v1/remote_write"), login=False), _compose(login=False)
    source["jsonData"] |= {"sigV4Auth": True, "sigV4AuthType": "default", "sigV4Region": region}
    service = compose["services"]["grafana"]
    service["environment"] |= {
        "GF_AUTH_SIGV4_AUTH_ENABLED": "true", "AWS_SDK_LOAD_CONFIG": "true", "AWS_PROFILE": "${AWS_PROFILE:-default}",
        "AWS_CONFIG_FILE": "/aws/config", "AWS_SHARED_CREDENTIALS_FILE": "/aws/credentials",
    }  # fmt: skip
    service["user"] = "${UID:-0}"  # the owner of the credentials and of the password file
    service["volumes"].append("${HOME}/.aws:/aws:ro")
    return _files(cluster, source, compose)


def _files(cluster: str, source: Mapping[str, Any], compose: Mapping[str, Any]) -> dict[str, str]:
    texts = {
        "provisioning/datasources/prometheus.yml": {"apiVersion": 1, "datasources": [dict(source)]},
        "provisioning/dashboards/dalsegno.yml": _provider(),
        "compose.yml": dict(compose),
    }
    dashboards = {
        f"dashboards/{each.uid}.json": json.dumps(dashboard_json(each), indent=2, ensure_ascii=False) + "\n"
        for each in DASHBOARDS
    }
    return {**dashboards, **{name: yaml_text(content, cluster, WRITER) for name, content in texts.items()}}


def _datasource(url: str, login: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": "Dal Segno",
        "uid": DATASOURCE_UID,
        "type": "prometheus",
        "access": "proxy",
        "url": url,
        "isDefault": True,
        "jsonData": {"httpMethod": "POST", "timeInterval": "15s"},
    }
    if login:
        # Grafana reads the password from its file at start, so the configuration does not contain it.
        found |= {"basicAuth": True, "basicAuthUser": USER}
        found["secureJsonData"] = {"basicAuthPassword": f"$__file{{/run/secrets/{PASSWORD}}}"}
    return found


def _provider() -> dict[str, Any]:
    provider = {
        "name": "dalsegno",
        "folder": "Dal Segno",
        "type": "file",
        "disableDeletion": True,
        "allowUiUpdates": False,
        "options": {"path": DASHBOARD_FOLDER},
    }
    return {"apiVersion": 1, "providers": [provider]}


def _compose(login: bool) -> dict[str, Any]:
    """Return the compose file. Grafana uses the host's network, so that it can reach the cluster's head, and listens on
    loopback only. Its user `admin` gets our password instead of Grafana's default, which all users of the host know."""
    passwords = [ADMIN_PASSWORD, *([PASSWORD] if login else [])]
    service: dict[str, Any] = {
        "image": IMAGE,
        "network_mode": "host",
        "restart": "unless-stopped",
        "user": "0",  # run as root, because only root can read the files with passwords
        "secrets": passwords,
        "environment": {
            "GF_SERVER_HTTP_ADDR": "127.0.0.1",
            "GF_ANALYTICS_REPORTING_ENABLED": "false",
            "GF_SECURITY_ADMIN_PASSWORD__FILE": f"/run/secrets/{ADMIN_PASSWORD}",
        },
        "volumes": [
            "./provisioning:/etc/grafana/provisioning:ro",
            f"./dashboards:{DASHBOARD_FOLDER}:ro",
            "grafana:/var/lib/grafana",
        ],
    }
    secrets = {name: {"file": f"./{name}"} for name in passwords}
    return {"services": {"grafana": service}, "volumes": {"grafana": None}, "secrets": secrets}
