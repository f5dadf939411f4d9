"""The lifecycle script of HyperPod on virtual hosts: twice, as each role that the list of instances gives a host."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import pytest

from dalsegno.setup.bootstrap import BootstrapCode, CodeSource, render_bootstrap
from dalsegno.setup.delivery import find_bundle
from dalsegno.setup.node_plan import NodePlan, PlannedService
from dalsegno.slurm.parse.text import PLAIN
from dalsegno.spec.facts import Cluster
from dalsegno.targets.hyperpod.answers import SlurmRole
from dalsegno.targets.hyperpod.lifecycle import lifecycle_files
from dalsegno.targets.hyperpod.node_plans import role_plan
from dalsegno.targets.hyperpod.partitions import PROLOG
from dalsegno.targets.hyperpod.target import HEAD_ADDRESS
from tests.ssh.conftest import ssh_hosts
from tests.ssh.hosts import VirtualHost, reason_to_skip
from tests.targets.hyperpod.conftest import CPU, cluster_of
from tests.waiting import eventually

__all__ = ["ssh_hosts"]
GROUPS = {SlurmRole.CONTROLLER: "controller", SlurmRole.LOGIN: "login", SlurmRole.COMPUTE: "cpu"}
USERS = "users: [{name: ann, uid: 10007}]\n"


AGENT = "printf '%s\\n' \"$@\" > /run/agent-arguments; exec sleep 1000"


def run_twice(host: VirtualHost, plan: NodePlan, cluster: Cluster, role: SlurmRole) -> tuple[str, str]:
    """Run the lifecycle script as HyperPod does, and again. Return what it printed."""
    address = host.run("hostname", "-I").split()[0]
    script = render_bootstrap(plan, BootstrapCode(CodeSource.BESIDE), HEAD_ADDRESS)
    files = lifecycle_files(cluster, [], {role: script}, find_bundle().archive())
    groups = {"controller": "203.0.113.9", GROUPS[role]: address}
    instances = [{"Name": name, "Instances": [{"CustomerIpAddress": ip}]} for name, ip in groups.items()]
    host.run("mkdir", "-p", "/root/lifecycle", "/opt/ml/config")
    listed = json.dumps({"InstanceGroups": instances})
    host.run("sh", "-c", "cat > /opt/ml/config/resource_config.json", stdin=listed)
    for name, content in files.items():
        packed = base64.b64encode(content).decode()
        host.run("sh", "-c", 'base64 -d > "/root/lifecycle/$0"', name, stdin=packed)
    return host.run("bash", "/root/lifecycle/on_create.sh"), host.run("bash", "/root/lifecycle/on_create.sh")


@pytest.mark.cluster
@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "-")
def test_lifecycle_script_sets_a_compute_node_up_and_changes_nothing_the_second_time(ssh_hosts):
    host = ssh_hosts(1).hosts[0]
    cluster = cluster_of(CPU, "", USERS)
    plan = role_plan(cluster, SlurmRole.COMPUTE, find_bundle().key, ends={"cpu": 4e9, "gpu": 5e9})
    (agent,) = plan.services
    fake = PlannedService("node-agent", ("/bin/sh", "-c", AGENT, *agent.argv), agent.log, agent.env, agent.revision)
    first, again = run_twice(host, replace(plan, services=(fake,)), cluster, SlurmRole.COMPUTE)
    assert "instance group cpu, role Compute, controller 203.0.113.9" in first
    assert '"changes": []' in again
    assert host.run("id", "-u", "ann") == "10007\n"
    assert host.run("stat", "-c", "%a %U", PROLOG) == "755 root\n"
    eventually(lambda: host.run("cat", "/run/agent-arguments"))
    words = host.run("cat", "/run/agent-arguments").split()
    assert words[words.index("--controller") + 1].startswith("203.0.113.9:")
    cloud = json.loads(host.run("cat", words[words.index("--cloud") + 1]))
    ends = {host.run("hostname", "-s").strip(): 4e9}
    assert cloud == {"cloud": "hyperpod", "ends": ends, "reservation_s": 600.0}
    assert words[words.index("--node") + 1] == host.run("hostname", "-s").strip()
    assert "s3://sagemaker-demo-lifecycle/demo" in host.run("cat", "/usr/local/sbin/dalsegno-refresh")
    assert "dalsegno: bootstrap" in host.run("cat", "/var/log/provision/provisioning.log")


P5 = "  - {name: train, nodes: 2, instance: ml.p5.48xlarge}\n"
NODE = "State=IDLE CPUTot=192 RealMemory=2000000 Gres=gpu:h100:8 Partitions=train"


@pytest.mark.cluster
@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "-")
def test_runs_and_benchmarks_on_the_login_node_get_the_efa_variables_of_the_instance_type(ssh_hosts):
    """Slurm on HyperPod does not know instance types. A stand-in for its commands answers as slurmctld would."""
    host, cluster = ssh_hosts(1).hosts[0], cluster_of(P5, "", USERS)
    _, again = run_twice(host, role_plan(cluster, SlurmRole.LOGIN, find_bundle().key), cluster, SlurmRole.LOGIN)
    assert '"changes": []' in again
    names = ("ip-10-4-33-1", "ip-10-4-33-2")
    rows = [("train*", "up", "infinite", "idle", name) for name in names]
    answers = {
        "sinfo": "".join(PLAIN.field.join(row) + PLAIN.record for row in rows),
        "scontrol": "".join(f"NodeName={name} {NODE}\n" for name in names),
        "sbatch": "7\n",
    }
    for program, answer in answers.items():
        host.run("sh", "-c", f"mkdir -p /opt/slurm/bin && cat > /opt/slurm/{program}", stdin=answer)
        script = f"#!/bin/sh\nexec cat /opt/slurm/{program}\n"
        host.run("sh", "-c", f"cat > /opt/slurm/bin/{program} && chmod 755 /opt/slurm/bin/{program}", stdin=script)
    path = "PATH=/opt/slurm/bin:/usr/local/bin:/usr/bin:/bin"
    nodes = ("--nodes", "2", "--gpus-per-node", "8")
    assert "FI_PROVIDER=efa" in host.run("env", path, "dalsegno", "bench", "all_reduce", "--dry-run", *nodes)
    host.run("env", path, "dalsegno", "run", "--detach", *nodes, "--", "/bin/true")
    assert "FI_PROVIDER" in host.run("grep", "-rh", "FI_PROVIDER", "/var/lib/dalsegno/runs")
    listed = host.run("env", path, "dalsegno", "ls")
    assert "demo" not in listed, "the cluster's own commands work on the head"


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "-")
def test_lifecycle_script_sets_controller_and_login_node_up_and_changes_nothing_the_second_time(ssh_hosts):
    """The daemons of the controller really start. Only Slurm is missing."""
    rack, cluster = ssh_hosts(2), cluster_of(CPU, "", USERS)
    for host, role in zip(rack.hosts, (SlurmRole.CONTROLLER, SlurmRole.LOGIN), strict=True):
        host.run("sh", "-c", "mkdir -p /opt/slurm/etc && echo ClusterName=demo > /opt/slurm/etc/slurm.conf")
        first, again = run_twice(host, role_plan(cluster, role, find_bundle().key), cluster, role)
        assert f"role {role.value}" in first and '"changes": []' in again
        assert host.run("id", "-u", "ann") == "10007\n"
        assert find_bundle().key.startswith(host.run("/usr/local/bin/dalsegno", "--version").split()[-1])
    head = rack.hosts[0]
    for daemon in ("controller", "observer", "hyperpod-partitions"):
        eventually(lambda daemon=daemon: head.run("cat", f"/var/log/dalsegno/{daemon}.log"))
    assert json.loads(head.run("cat", "/var/lib/dalsegno/clusters/demo/state.json"))["role"] == "head"
