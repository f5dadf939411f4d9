"""The client of Prometheus' API, and the commands that need no cluster."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dalsegno.cli.measure.dashboards import command as dashboards
from dalsegno.errors import DalsegnoError
from dalsegno.observe.http_server import HttpRequest, HttpResponse, HttpServer
from dalsegno.observe.prometheus_client import PrometheusClient, QuerySample, ScrapeState

VECTOR = {"resultType": "vector", "result": [{"metric": {"a": "1"}, "value": [0, "2.5"]}]}
TARGETS = {
    "activeTargets": [
        {"labels": {"job": "node", "instance": "n1"}, "discoveredLabels": {"__address__": "n1:1"}, "health": "up"},
        {"labels": {"job": "node", "instance": "n2"}, "health": "down", "lastError": "refused"},
        {"labels": {"job": "node", "instance": "n3"}, "health": "unknown"},
    ]
}
ALERTS = {
    "alerts": [
        {
            "state": "firing",
            "labels": {"alertname": "GpuHot", "severity": "warning"},
            "annotations": {"summary": "hot"},
        },
        {"state": "pending", "labels": {"alertname": "NodeDown"}},
    ]
}


def answer(request: HttpRequest) -> HttpResponse:
    login = base64.b64encode(b"dalsegno:secret").decode()
    if request.headers.get("authorization") != f"Basic {login}":
        return HttpResponse(401, b"Unauthorized\n")
    if request.query.get("query") == "bad(":
        return HttpResponse(400, json.dumps({"status": "error", "error": "parse error"}).encode())
    data = {"/api/v1/query": VECTOR, "/api/v1/targets": TARGETS, "/api/v1/alerts": ALERTS}[request.path]
    return HttpResponse(body=json.dumps({"status": "success", "data": data}).encode())


@pytest.fixture
def address() -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(listener, answer)
    server.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    server.close()


def test_values_targets_and_firing_alerts_are_read(address: str):
    client = PrometheusClient(address, "secret")
    assert client.ready() and client.query("up") == [QuerySample({"a": "1"}, 2.5)]
    assert [(each.host, each.state, each.error) for each in client.targets()] == [
        ("n1", ScrapeState.UP, ""),
        ("n2", ScrapeState.DOWN, "refused"),
        ("n3", ScrapeState.UNKNOWN, ""),
    ]
    assert [(each.name, each.summary) for each in client.alerts()] == [("GpuHot", "hot")]


def test_refusals_name_the_reason(address: str):
    with pytest.raises(DalsegnoError, match="parse error"):
        PrometheusClient(address, "secret").query("bad(")
    with pytest.raises(DalsegnoError, match="401"):
        PrometheusClient(address, "wrong").query("up")


def test_prometheus_that_does_not_run_is_not_ready():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    client = PrometheusClient(f"127.0.0.1:{port}", "", timeout_s=1)
    assert not client.ready()
    with pytest.raises(DalsegnoError, match="does not answer"):
        client.targets()


def test_dashboards_for_another_prometheus_need_no_cluster(tmp_path: Path):
    done = CliRunner().invoke(dashboards, ["export", str(tmp_path / "grafana"), "--prometheus", "prom:9090"])
    assert done.exit_code == 0, done.output
    assert len(list((tmp_path / "grafana/dashboards").glob("*.json"))) == 6
    assert not (tmp_path / "grafana/prometheus-password").exists()


def test_password_of_grafanas_admin_is_private_and_kept_by_later_exports(tmp_path: Path):
    made = []
    for folder in ("one", "one", "two"):
        done = CliRunner().invoke(dashboards, ["export", str(tmp_path / folder), "--prometheus", "prom:9090"])
        assert done.exit_code == 0, done.output
        file = tmp_path / folder / "admin-password"
        assert file.stat().st_mode & 0o777 == 0o600
        made.append(file.read_text())
    assert made[0] == made[1] != made[2] and len(made[0].strip()) > 20
