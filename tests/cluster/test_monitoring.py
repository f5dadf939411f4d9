"""Tests of monitoring on a real cluster: Prometheus scrapes it, and every panel of every dashboard has data."""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dalsegno.health.readers.fabric import PortCounters
from dalsegno.node_agent.metrics import port_families
from dalsegno.observe.dashboards import DASHBOARDS
from dalsegno.observe.dialects import DIALECTS, EFA_COUNTERS
from dalsegno.observe.exposition import render
from dalsegno.observe.panels import dashboard_json
from dalsegno.observe.prometheus_client import PrometheusClient, ScrapeState
from dalsegno.targets.local.folder import Folder
from tests.cluster.conftest import Cli, at_home, taken_down
from tests.cluster.runs import LONG_S, Run
from tests.observe.published import PUBLISHED, PublishedDashboard, expect_data
from tests.waiting import eventually

FILE = """
name: one
target: local
local: {{subnet: 10.254.112.0/20}}
partitions:
  - {{name: train, nodes: 2, spares: {spares}, gpus: 1, gpu_type: h100, cpus: 4, memory: 1G, default: true}}
health: {{per_hour: 100, max_out: 50%}}
monitoring:
  interval: 1s
  prometheus: true
  alerts: {{webhook: [{{url: "http://10.254.112.1:{port}/"}}]}}
"""
TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from dalsegno.train import Checkpointer

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
ckpt = Checkpointer(sys.argv[2], model=model, optimizer=optimizer)
for step in ckpt.steps(100000):
    time.sleep(0.1)
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    stop = torch.tensor([float(os.path.exists(sys.argv[1]))])
    dist.broadcast(stop, 0)
    ckpt.done(step, loss=loss, samples=2, tokens=512)
    if stop:
        break
dist.destroy_process_group()
"""
VALUES = {
    "$__rate_interval": "5m",
    "$__range": "5m",
    "$cluster": "one",
    "$node": ".*",
    "$run": ".*",
    "$partition": ".*",
}
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.waits,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="the package prometheus is missing"),
]


@dataclass(frozen=True)
class Watched:
    """A cluster with Prometheus and a run, and the alerts that a webhook has received."""

    cli: Cli
    prometheus: PrometheusClient
    run: Run
    received: list[dict[str, Any]]
    port: int  # port of the webhook

    def answers(self, expr: str) -> bool:
        return bool(self.prometheus.query(expr))

    def has(self, expr: str) -> bool:
        """Return whether a query returns a number. A quantile without samples is NaN."""
        return any(not math.isnan(sample.value) for sample in self.prometheus.query(expr))


def receive_alerts(received: list[dict[str, Any]]) -> ThreadingHTTPServer:
    """Start an HTTP server that keeps the alerts it gets."""

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("0.0.0.0", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture(scope="module")
def watched(cache: Path) -> Iterator[Watched]:
    pytest.importorskip("torch")
    received: list[dict[str, Any]] = []
    server = receive_alerts(received)
    with taken_down(at_home(cache)) as cli:
        cli.ok("up", cli.file(FILE.format(port=server.server_port, spares=1)))
        folder = Folder(cli.home / "clusters/one")
        work = cli.home / "work"
        args = (str(work / "stop"), str(work / "ckpt"))
        options = ("-N", "1", "--gpus-per-node", "1", "--nproc-per-node", "1")
        run = Run.start(cli, work, *options, script=TRAIN, args=args)
        # test_every_query_of_every_panel_returns_data has lost this node, and the run replaces it.
        lost = eventually(lambda: run.nodes)
        write_fabric(folder.node_metrics("train-2" if "train-1" in lost else "train-1"))
        status = json.loads(cli.run("monitor", "status", "--json").out)
        prometheus = PrometheusClient(status["prometheus"], folder.monitor_password.read_text())
        yield Watched(cli, prometheus, run, received, server.server_port)
        assert run.finish() == 0
    server.shutdown()


def write_fabric(folder: Path) -> None:
    """Write metrics of an EFA device and an InfiniBand port, which local nodes lack, next to the node's own metrics."""
    efa = PortCounters("rdmap16s27", "1", "efa", True, dict.fromkeys(EFA_COUNTERS, 7))
    infiniband = PortCounters("mlx5_0", "1", "ib", True, {"port_xmit_data": 7, "port_rcv_data": 7})
    (folder / "fabric.prom").write_bytes(render(port_families([efa, infiniband])))


def wait_for_all(has: Callable[[str], bool], queries: list[str]) -> None:
    """Wait until every query has returned data once; name those that have not."""
    left = list(queries)

    def all_found() -> bool:
        left[:] = [query for query in left if not has(query)]
        if left:
            raise LookupError(f"{len(left)} of {len(queries)} queries return no data: {left[:5]}")
        return True

    eventually(all_found, LONG_S, every_s=1.0)


def test_every_query_of_every_panel_returns_data(watched: Watched):
    panels = [panel for each in DASHBOARDS for panel in dashboard_json(each)["panels"]]
    queries = list(dict.fromkeys(target["expr"] for panel in panels for target in panel["targets"]))
    assert len(queries) > 80
    before = ["training_step > 0", "dalsegno_recovery_detect_seconds_count", "slurm_job_queue_wait_seconds_count"]
    wait_for_all(watched.has, before)  # Prometheus counts an increase only after the first sample
    # Replacing the node produces the recovery-time metrics.
    watched.cli.ok("inject", "power-off", watched.run.nodes[0])
    watched.cli.ok("shell", "--", "sbatch", "-o", "/dev/null", "--wrap", "true")  # its wait is a sample
    wait_for_all(watched.has, [with_values(query) for query in queries])
    eventually(lambda: watched.cli.ok("monitor", "check") == "", LONG_S, every_s=1.0)  # the run has just resumed


def with_values(query: str) -> str:
    for name, value in VALUES.items():
        query = query.replace(name, value)
    assert "$" not in re.sub(r'"\$\d"', "", query), query
    return query


@pytest.mark.parametrize("dashboard", PUBLISHED, ids=lambda each: str(each.id))
def test_every_query_of_a_published_dashboard_returns_data(watched: Watched, dashboard: PublishedDashboard):
    chosen = {"$job": "node", "$nodename": "train-1", "$node": "train-1"}
    wait_for_all(watched.answers, ['DCGM_FI_DEV_GPU_TEMP{instance="train-1"}'])  # Prometheus has read the metric
    for name, (query, label) in dashboard.choices(chosen).items():  # the values that the dashboard's menus offer
        offered = {sample.labels.get(label) for sample in watched.prometheus.query(query)}
        assert chosen.get(name, "train-1" if label == "instance" else "0") in offered, name
    values = {"$instance": ".*", "$gpu": ".*", "$__rate_interval": "30s", **chosen}
    version = watched.prometheus.query("node_exporter_build_info")[0].labels["version"]
    expected = expect_data(dashboard.queries(values), version)
    assert expected.some
    wait_for_all(watched.answers, expected.some)  # NaN counts as an answer, such as the used share of swap without swap
    returned = {query: why for query, why in expected.none.items() if watched.answers(query)}
    assert not returned, "these are to be taken out of without_data.json"


def test_recording_rules_provide_the_names_of_other_exporters(watched: Watched):
    names = {rule.record for rules in DIALECTS.values() for rule in rules}
    unsupported = {"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION_total"}  # simulated GPUs do not count energy
    wait_for_all(watched.has, sorted(names - unsupported))
    assert watched.prometheus.query("sum(slurm_nodes_total)")[0].value == 3
    assert watched.prometheus.query('slurm_partition_job_state_total{state="RUNNING"}')[0].value >= 1


def test_targets_have_labels_and_need_the_password(watched: Watched):
    labels = {sample.labels["instance"]: sample.labels for sample in watched.prometheus.query('up{job="node"}')}
    assert set(labels) == {"head", "train-1", "train-2", "train-3"}
    assert (labels["train-3"]["partition"], labels["train-3"]["spare"], labels["train-3"]["cluster"]) == (
        "train", "yes", "one",
    )  # fmt: skip
    with pytest.raises(Exception, match="401"):
        PrometheusClient(watched.prometheus.address, "wrong").query("up")


def test_an_alert_reaches_the_webhook(watched: Watched):
    watched.cli.ok("automation", "pause")  # so that the node keeps its fault
    watched.cli.ok("inject", "xid", "79", "train-2")
    try:
        eventually(lambda: any(each.name == "GpuXid" for each in watched.prometheus.alerts()))
        alert = eventually(lambda: next(filter(_is_xid, _alerts(watched.received)), None), LONG_S)
        assert alert["annotations"]["summary"] == "Xid 79 on GPU 0 of train-2"
        assert alert["labels"]["cluster"] == "one"
        shown = json.loads(watched.cli.run("monitor", "status", "--json").out)["alerts"]
        assert "GpuXid" in {each["name"] for each in shown}
    finally:
        watched.cli.ok("inject", "--clear", "train-2")
        watched.cli.ok("automation", "resume")


def _alerts(received: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [alert for each in received for alert in each["alerts"]]


def _is_xid(alert: dict[str, Any]) -> bool:
    return alert["labels"]["alertname"] == "GpuXid"


def test_prometheus_reads_a_new_node_after_up(watched: Watched):
    watched.cli.ok("up", watched.cli.file(FILE.format(port=watched.port, spares=2)))
    new = 'up{job="node", instance="train-4", partition="train", spare="yes"} == 1'
    eventually(lambda: watched.has(new), LONG_S)


def test_down_stops_everything_and_up_starts_it_again(watched: Watched):
    watched.cli.ok("monitor", "down")
    assert "Prometheus does not run" in watched.cli.run("monitor", "status").err
    assert "prometheus" not in json.dumps(watched.cli.status("one")["daemons"])
    watched.cli.ok("monitor", "up")
    eventually(lambda: {each.state for each in watched.prometheus.targets()} == {ScrapeState.UP})
    assert watched.cli.run("monitor", "status").code == 0
