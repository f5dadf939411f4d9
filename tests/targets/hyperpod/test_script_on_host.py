"""The lifecycle script of HyperPod on a virtual host: twice, as the role that the list of instances gives the host."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import pytest

from dalsegno.setup.bootstrap import BootstrapCode, CodeSource, render_bootstrap
from dalsegno.setup.delivery import find_bundle
from dalsegno.setup.node_plan import PlannedService
from dalsegno.targets.hyperpod.answers import SlurmRole
from dalsegno.targets.hyperpod.lifecycle import lifecycle_files
from dalsegno.targets.hyperpod.node_plans import role_plan
from dalsegno.targets.hyperpod.target import HEAD_ADDRESS
from tests.ssh.conftest import ssh_hosts
from tests.ssh.hosts import reason_to_skip
from tests.targets.hyperpod.conftest import CPU, cluster_of
from tests.waiting import eventually

__all__ = ["ssh_hosts"]
USERS = "users: [{name: ann, uid: 10007}]\n"


@pytest.mark.cluster
@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "-")
def test_lifecycle_script_sets_a_compute_node_up_and_changes_nothing_the_second_time(ssh_hosts):
    host = ssh_hosts(1).hosts[0]
    address = host.run("hostname", "-I").split()[0]
    bundle, cluster = find_bundle(), cluster_of(CPU, "", USERS)
    plan = role_plan(cluster, SlurmRole.COMPUTE, bundle.key)
    (agent,) = plan.services
    record = "printf '%s\\n' \"$@\" > /run/agent-arguments; exec sleep 1000"
    fake = PlannedService("node-agent", ("/bin/sh", "-c", record, *agent.argv), agent.log, agent.env, agent.revision)
    script = render_bootstrap(replace(plan, services=(fake,)), BootstrapCode(CodeSource.BESIDE), HEAD_ADDRESS)
    files = lifecycle_files(cluster, [], {SlurmRole.COMPUTE: script}, bundle.archive())
    groups = [("controller", "203.0.113.9"), ("cpu", address)]
    instances = [{"Name": name, "Instances": [{"CustomerIpAddress": ip}]} for name, ip in groups]
    host.run("mkdir", "-p", "/root/lifecycle", "/opt/ml/config")
    listed = json.dumps({"InstanceGroups": instances})
    host.run("sh", "-c", "cat > /opt/ml/config/resource_config.json", stdin=listed)
    for name, content in files.items():
        packed = base64.b64encode(content).decode()
        host.run("sh", "-c", 'base64 -d > "/root/lifecycle/$0"', name, stdin=packed)
    first, again = (host.run("bash", "/root/lifecycle/on_create.sh") for _ in range(2))
    assert "instance group cpu, role Compute, controller 203.0.113.9" in first
    assert '"changes": []' in again
    assert host.run("id", "-u", "ann") == "10007\n"
    eventually(lambda: host.run("cat", "/run/agent-arguments"))
    words = host.run("cat", "/run/agent-arguments").split()
    assert words[words.index("--controller") + 1].startswith("203.0.113.9:")
    assert words[words.index("--node") + 1] == host.run("hostname", "-s").strip()
    assert "s3://sagemaker-demo-lifecycle/demo" in host.run("cat", "/usr/local/sbin/dalsegno-refresh")
    assert "dalsegno: bootstrap" in host.run("cat", "/var/log/provision/provisioning.log")
