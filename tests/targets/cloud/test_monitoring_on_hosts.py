"""Monitoring as the bootstrap scripts of both platforms set it up: real programs on virtual hosts, with a real
slurmctld and a second Prometheus as the receiver of remote write."""

from __future__ import annotations

import base64
import json
import shutil
from dataclasses import replace
from typing import Any

import pytest

from dalsegno.setup.bootstrap import BootstrapCode, CodeSource, render_bootstrap
from dalsegno.setup.delivery import find_bundle
from dalsegno.setup.node_plan import NodePlan
from dalsegno.spec.facts import Cluster, RemoteWrite
from dalsegno.spec.load import parse_spec
from dalsegno.spec.resolve import resolve
from dalsegno.targets.hyperpod.answers import SlurmRole
from dalsegno.targets.hyperpod.lifecycle import RESOURCES, lifecycle_files
from dalsegno.targets.hyperpod.node_plans import role_plan
from dalsegno.targets.hyperpod.target import HEAD_ADDRESS
from dalsegno.targets.parallelcluster.folder import PclusterStage, PclusterState
from dalsegno.targets.parallelcluster.scripts import machine_plans, site_of
from tests.ssh.hosts import HostRack, VirtualHost, reason_to_skip, running_hosts
from tests.targets.hyperpod.conftest import CPU, cluster_of
from tests.waiting import PATIENCE_S, eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.waits,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "-"),
    pytest.mark.skipif(not shutil.which("prometheus"), reason="the package prometheus is missing"),
]
RECEIVER = "127.0.0.1:9199"
ONCE_A_SECOND = "monitoring: {prometheus: true, interval: 1s}\n"
PCLUSTER = """
name: demo
target: parallelcluster
partitions: [{name: train, nodes: 1, instance: m5.xlarge}]
parallelcluster: {region: us-east-1}
"""
SLURM_CONF = """\
ClusterName=demo
SlurmctldHost={head}
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=/run/slurmctld
SlurmctldPidFile=/run/slurmctld.pid
SlurmctldPort=6820
ProctrackType=proctrack/linuxproc
ReturnToService=2
NodeName={node} CPUs=1 RealMemory=400
PartitionName=dev Nodes=ALL Default=YES State=UP
"""
START_SLURM = """
mkdir -p /run/munge /run/slurmctld /var/log/munge /var/lib/munge
chown munge: /run/munge /var/log/munge /var/lib/munge
dd if=/dev/urandom of=/etc/munge/munge.key bs=64 count=1 2> /dev/null
chown munge: /etc/munge /etc/munge/munge.key
chmod 0400 /etc/munge/munge.key
runuser -u munge -- munged --force
SLURM_CONF=/opt/slurm/etc/slurm.conf slurmctld > /run/slurmctld.out 2>&1 < /dev/null
"""
START_RECEIVER = """
mkdir -p /run/receiver
echo '{{}}' > /run/receiver/empty.yml
setsid prometheus --config.file=/run/receiver/empty.yml --storage.tsdb.path=/run/receiver/data \
  --web.listen-address={address} --web.enable-remote-write-receiver > /run/receiver/log 2>&1 < /dev/null &
"""


def copy(host: VirtualHost, path: str, data: bytes) -> None:
    packed = base64.b64encode(data).decode()
    host.run("sh", "-c", f"mkdir -p $(dirname {path}); base64 -d > {path}", stdin=packed)


def write_to_receiver(cluster: Cluster) -> Cluster:
    """Return the cluster with the receiver in the place of a workspace."""
    to = RemoteWrite(f"http://{RECEIVER}/api/v1/write", "us-east-1")
    return replace(cluster, monitoring=replace(cluster.monitoring, remote_write=to))


def with_credentials(plan: NodePlan) -> NodePlan:
    """Return the plan with credentials for Prometheus, which on AWS come from the machine's role."""
    env = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    services = [replace(each, env={**each.env, **env}) if each.name == "prometheus" else each for each in plan.services]
    return replace(plan, services=tuple(services))


def start_slurm_and_receiver(rack: HostRack, head: VirtualHost, node: str, address: str) -> None:
    for host in rack.hosts:
        host.run("sh", "-c", "cat >> /etc/hosts", stdin=f"{address} {node}\n{head.address} {head.name}\n")
    copy(head, "/opt/slurm/etc/slurm.conf", SLURM_CONF.format(head=head.name, node=node).encode())
    head.run("sh", "-ec", START_SLURM)
    head.run("sh", "-ec", START_RECEIVER.format(address=RECEIVER))


def ask(head: VirtualHost, *words: str) -> Any:
    """Return what a `monitor` command prints as JSON on the head. Its exit code says whether something fails."""
    return json.loads(head.run("sh", "-c", '/usr/local/bin/dalsegno monitor "$@" --json || true', "sh", *words))


def expect_monitoring(head: VirtualHost, node: str) -> None:
    """Check that Prometheus reads all exporters of head and node, and that the receiver gets their metrics."""
    everything = {("slurm", "head"), ("node", "head"), ("node", node), ("dalsegno", "head"), ("prometheus", "head")}

    def healthy() -> bool:
        told = ask(head, "status")
        up = {(each["job"], each["host"]) for each in told["targets"] if each["state"] == "up"}
        if up != everything or [each["state"] for each in told["remote_write"]] != ["up"]:
            raise LookupError(told["targets"], told["remote_write"])  # Prometheus takes seconds to find its targets
        return bool(told["remote_write"][0]["sent"])

    eventually(healthy, timeout_s=2 * PATIENCE_S)
    head.run("/usr/local/bin/dalsegno", "monitor", "status")  # exits 0
    query = "curl -sf 'http://{}/api/v1/query?query=count%20by%20(job)%20({})'"
    for metric, job in {
        "slurm_nodes_total": "slurm",
        "node_uname_info": "node",
        "dalsegno_node_metrics_timestamp_seconds": "node",
        "dalsegno_collector_success": "dalsegno",
    }.items():
        seen = query.format(RECEIVER, metric)
        eventually(lambda seen=seen, job=job: f'"job":"{job}"' in head.run("sh", "-c", seen))
    code = "curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:9090/api/v1/query?query=training_up"
    assert head.run("sh", "-c", code) == "401", "users of the head may not read the metrics of others' runs"
    secrets = head.run("sh", "-c", "stat -c '%a %U %n' /var/lib/dalsegno/clusters/*/prometheus/monitor-*").splitlines()
    assert [each.split()[:2] for each in secrets] == [["400", "prometheus"]] * 2
    missing = ask(head, "check")
    assert [each for each in missing if each["state"] == "failing"] == []
    listens = head.run("ss", "-Hltn")
    assert all(f"127.0.0.1:{port}" in listens and f"*:{port}" not in listens for port in (9090, 9100, 9341))


def test_parallelcluster_scripts_start_prometheus_that_reads_every_exporter_and_writes_elsewhere(tmp_path):
    cluster = write_to_receiver(resolve(parse_spec(f"{PCLUSTER}{ONCE_A_SECOND}", "cluster.yaml")))
    bundle, node_name = find_bundle(), "train-st-train-1"
    state = PclusterState(PclusterStage.UP, "c0ffee", "us-east-1", "3.16.1", bucket="b")
    plans = machine_plans(site_of(cluster, state, bundle.key), "b")
    code = BootstrapCode(CodeSource.BESIDE)
    with running_hosts(2, tmp_path / "hosts", ["head-node", node_name]) as rack:
        head, node = rack["head-node"], rack[node_name]
        start_slurm_and_receiver(rack, head, node_name, node.address)
        for host, role in ((head, "head"), (node, "compute")):
            copy(host, "/root/dalsegno.tar.gz", bundle.archive())
            script = render_bootstrap(with_credentials(plans[role]), code, f"printf {head.address}")
            copy(host, "/root/bootstrap.sh", script.encode())
            if host is node:  # /opt/slurm is shared there
                secret = f"/opt/slurm/etc/dalsegno/agents/{node_name}"
                copy(node, secret, head.run("cat", secret).encode())
            host.run("bash", "/root/bootstrap.sh")
            assert '"changes": []' in host.run("bash", "/root/bootstrap.sh")
        expect_monitoring(head, node_name)


def test_hyperpod_scripts_start_prometheus_that_reads_every_exporter_and_writes_elsewhere(tmp_path):
    """The service hyperpod-partitions names the nodes to Prometheus, from Slurm and HyperPod's list of instances."""
    cluster = write_to_receiver(cluster_of(CPU, "", "monitoring: {interval: 1s}\n"))
    with running_hosts(2, tmp_path / "hosts", ["controller-1", "cpu-1"]) as rack:
        head, node = rack["controller-1"], rack["cpu-1"]
        node_name = f"ip-{node.address.replace('.', '-')}"
        node.run("hostname", node_name)
        start_slurm_and_receiver(rack, head, node_name, node.address)
        copy(node, "/etc/munge/munge.key", base64.b64decode(head.run("base64", "/etc/munge/munge.key")))
        groups = {"controller": head.address, "cpu": node.address}
        instances = [{"Name": name, "Instances": [{"CustomerIpAddress": ip}]} for name, ip in groups.items()]
        roles = {head: SlurmRole.CONTROLLER, node: SlurmRole.COMPUTE}
        for host, role in roles.items():
            plan = with_credentials(role_plan(cluster, role, find_bundle().key, monitored=True))
            script = render_bootstrap(plan, BootstrapCode(CodeSource.BESIDE), HEAD_ADDRESS)
            for name, content in lifecycle_files(cluster, [], {role: script}, find_bundle().archive()).items():
                copy(host, f"/root/lifecycle/{name}", content)
            copy(host, RESOURCES, json.dumps({"InstanceGroups": instances}).encode())
            host.run("bash", "/root/lifecycle/on_create.sh")
            assert '"changes": []' in host.run("bash", "/root/lifecycle/on_create.sh")
        expect_monitoring(head, node_name)


def test_status_names_an_exporter_and_a_workspace_that_fail(tmp_path):
    """A node whose exporter is not set up yet, and a workspace that does not answer."""
    cluster = write_to_receiver(resolve(parse_spec(f"{PCLUSTER}{ONCE_A_SECOND}", "cluster.yaml")))
    bundle = find_bundle()
    state = PclusterState(PclusterStage.UP, "c0ffee", "us-east-1", "3.16.1", bucket="b")
    plan = with_credentials(machine_plans(site_of(cluster, state, bundle.key), "b")["head"])
    with running_hosts(2, tmp_path / "hosts", ["head-node", "train-st-train-1"]) as rack:
        head, node = rack.hosts
        head.run("sh", "-c", "cat >> /etc/hosts", stdin=f"{node.address} {node.name}\n")
        copy(head, "/opt/slurm/etc/slurm.conf", b"ClusterName=demo\n")
        copy(head, "/root/dalsegno.tar.gz", bundle.archive())
        script = render_bootstrap(plan, BootstrapCode(CodeSource.BESIDE), f"printf {head.address}")
        copy(head, "/root/bootstrap.sh", script.encode())
        head.run("bash", "/root/bootstrap.sh")

        def failures() -> bool:
            told = ask(head, "status")
            (found,) = [each for each in told["targets"] if each["host"] == node.name]
            (write,) = told["remote_write"]
            return found["state"] == "down" and "refused" in found["error"] and write["state"] == "failing"

        eventually(failures, timeout_s=2 * PATIENCE_S)
        shown = head.run("sh", "-c", "/usr/local/bin/dalsegno monitor status 2>&1; echo exit $?")
        assert "no sample has arrived yet" in shown and "exit 1" in shown
        failing = {each["origin"] for each in ask(head, "check") if each["state"] == "failing"}
        assert "observer, from Slurm" in failing, "slurmctld does not run"
