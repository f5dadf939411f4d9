"""The files that start Grafana with our dashboards: JSON, provisioning, and a compose file. Pure."""

from __future__ import annotations

import json
from typing import Any

from dalsegno.observe.dashboards import DASHBOARDS
from dalsegno.observe.monitor_layout import USER
from dalsegno.observe.panels import DATASOURCE_UID, dashboard_json
from dalsegno.observe.prometheus import yaml_text

IMAGE = "grafana/grafana:11.4.0"
PASSWORD = "prometheus-password"  # name of the file with the password, and of the secret in the compose file
WRITER = "dalsegno dashboards export"
DASHBOARD_FOLDER = "/var/lib/grafana/dashboards"


def grafana_files(cluster: str, prometheus: str, *, login: bool) -> dict[str, str]:
    """Return the text of each file by its path. `login` says whether the Prometheus at this address has a password."""
    files = {
        f"dashboards/{each.uid}.json": json.dumps(dashboard_json(each), indent=2, ensure_ascii=False) + "\n"
        for each in DASHBOARDS
    }
    files["provisioning/datasources/prometheus.yml"] = yaml_text(_datasource(prometheus, login), cluster, WRITER)
    files["provisioning/dashboards/dalsegno.yml"] = yaml_text(_provider(), cluster, WRITER)
    files["compose.yml"] = yaml_text(_compose(login), cluster, WRITER)
    return files


def _datasource(prometheus: str, login: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": "Dal Segno",
        "uid": DATASOURCE_UID,
        "type": "prometheus",
        "access": "proxy",
        "url": f"http://{prometheus}",
        "isDefault": True,
        "jsonData": {"httpMethod": "POST", "timeInterval": "15s"},
    }
    if login:
        # Grafana reads the password from its file at start, so the configuration does not contain it.
        found |= {"basicAuth": True, "basicAuthUser": USER}
        found["secureJsonData"] = {"basicAuthPassword": f"$__file{{/run/secrets/{PASSWORD}}}"}
    return {"apiVersion": 1, "datasources": [found]}


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
    loopback only."""
    service: dict[str, Any] = {
        "image": IMAGE,
        "network_mode": "host",
        "restart": "unless-stopped",
        "environment": {"GF_SERVER_HTTP_ADDR": "127.0.0.1", "GF_ANALYTICS_REPORTING_ENABLED": "false"},
        "volumes": [
            "./provisioning:/etc/grafana/provisioning:ro",
            f"./dashboards:{DASHBOARD_FOLDER}:ro",
            "grafana:/var/lib/grafana",
        ],
    }
    found: dict[str, Any] = {"services": {"grafana": service}, "volumes": {"grafana": None}}
    if login:
        service |= {"user": "0", "secrets": [PASSWORD]}  # only root can read the password file
        found["secrets"] = {PASSWORD: {"file": f"./{PASSWORD}"}}
    return found
