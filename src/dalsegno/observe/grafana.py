"""The files that start Grafana with our dashboards: JSON, provisioning, and a compose file. Pure."""

from __future__ import annotations

import json
from typing import Any

from dalsegno.observe.dashboards import DASHBOARDS
from dalsegno.observe.monitor_layout import USER
from dalsegno.observe.panels import DATASOURCE_UID, dashboard_json
from dalsegno.observe.prometheus import yaml_text

IMAGE = "grafana/grafana:11.4.0"
PASSWORD = "prometheus-password"  # the file beside the compose file, and the name of its secret
WRITER = "dalsegno dashboards export"
DASHBOARD_FOLDER = "/var/lib/grafana/dashboards"


def grafana_files(cluster: str, prometheus: str, *, login: bool) -> dict[str, str]:
    """Return the text of each file by its path. `prometheus` is its address; with `login`, it asks for the password."""
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
        # Grafana reads the password from the file when it starts: no file of the configuration holds it.
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
    """Return the compose file. Grafana uses the network of this machine, on which the cluster's head can be reached,
    and listens on loopback only."""
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
        service |= {"user": "0", "secrets": [PASSWORD]}  # the file is readable by its owner only
        found["secrets"] = {PASSWORD: {"file": f"./{PASSWORD}"}}
    return found
