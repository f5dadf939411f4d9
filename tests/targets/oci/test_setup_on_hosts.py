"""The scripts of an OCI cluster on virtual hosts: a controller, a compute node whose agent connects, a login node."""

from __future__ import annotations

import base64

import pytest

from dalsegno.setup.bootstrap import PYTHON
from dalsegno.setup.delivery import find_bundle
from dalsegno.targets.cloud.agent_secrets import MUNGE_KEY, agent_secret
from dalsegno.targets.oci.node_plans import CUSTOM_ROLE, PROFILE, PROLOG, install_script, setup_files
from dalsegno.targets.oci.resource_manager import FakeResourceManager
from tests.ssh.hosts import VirtualHost, reason_to_skip, running_hosts
from tests.targets.cloud.test_bootstrap import ASK
from tests.targets.oci.conftest import cluster_of, open_oci
from tests.waiting import PATIENCE_S, eventually

KEY = b"the key of munge"
ROLE = b"---\n- name: Test role\n  ansible.builtin.debug:\n    msg: a role of theirs\n"


def copy(host: VirtualHost, path: str, data: bytes) -> None:
    packed = base64.b64encode(data).decode()
    host.run("sh", "-c", f"mkdir -p $(dirname {path}); base64 -d > {path}; chmod 600 {path}", stdin=packed)


@pytest.mark.cluster
@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "-")
def test_scripts_connect_a_node_to_the_controller_and_change_nothing_the_second_time(folder, tmp_path):
    cluster, bundle, name = cluster_of(folder), find_bundle(), "compute-1"
    script = install_script(cluster, setup_files(cluster, bundle.key), bundle.archive())
    with running_hosts(2, tmp_path / "hosts", ["controller", name]) as rack:
        head, node = rack["controller"], rack[name]
        copy(head, CUSTOM_ROLE, ROLE)
        copy(head, "/etc/slurm/slurm.conf", b"ClusterName=demo\n")
        copy(node, MUNGE_KEY, KEY)
        _, again = (head.run("bash", "-s", stdin=script) for _ in range(2))
        assert '"changes": []' in again
        role = head.run("cat", CUSTOM_ROLE)
        assert role.startswith(ROLE.decode()) and role.count("setup.sh node") == 1
        packed = head.run("sh", "-c", "tar -C /config/dalsegno -cz . | base64")
        node.run("sh", "-c", "mkdir /root/setup && base64 -d | tar -xz -C /root/setup", stdin=packed)
        _, again = (node.run("bash", "/root/setup/setup.sh", "compute") for _ in range(2))
        assert '"changes": []' in again
        assert node.run("sh", "-c", f". {PROFILE}; echo $NCCL_IB_GID_INDEX") == "3\n"
        assert node.run("stat", "-c", "%a %U", PROLOG, f"/var/lib/dalsegno/agents/{name}") == "755 root\n600 root\n"
        copy(head, f"/var/lib/dalsegno/agents/{name}", agent_secret(KEY, "demo", name).encode())
        connected = f"'node': '{name}', 'presence': 'connected'"
        eventually(lambda: connected in head.run(PYTHON, "-I", "-c", ASK))


NODES = """\
#!/bin/sh
printf 'compute-1\\ncompute-1\\n' # a node is in several partitions
"""
RUN_NODES = "PATH=/opt/stand-in:$PATH setsid bash /config/dalsegno/nodes.sh > nodes.log 2>&1; echo $? > nodes.rc"


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "-")
def test_scripts_without_up_set_up_nodes_and_login_node_over_ssh(folder, tmp_path):
    """The login user of the controller reaches the other machines with ssh and sudo, as on the stack's machines."""
    rest = (
        "login: {count: 1}\ncontainers: {enabled: true}\nmonitoring: {enabled: true}\n"
        "storage: [{name: home, mount: /mnt/home, type: fss, home: true}]\n"
    )
    cluster, names = cluster_of(folder, rest=rest), ["controller", "compute-1", "demo-login"]
    files = open_oci(folder, FakeResourceManager(), bundle=find_bundle).platform_files(cluster)
    with running_hosts(3, tmp_path / "hosts", names) as rack:
        head, node, login = (rack[name] for name in names)
        known = "".join(f"{host.address} {host.name}\n" for host in rack.hosts)
        for host in rack.hosts:
            host.run("sh", "-c", "cat >> /etc/hosts", stdin=known)
        copy(head, CUSTOM_ROLE, ROLE)
        copy(head, "/etc/slurm/slurm.conf", b"ClusterName=demo\n")
        copy(head, "/opt/stand-in/sinfo", NODES.encode())
        copy(head, "/home/admin/.ssh/id_ed25519", rack.key.read_bytes())
        head.run("sh", "-c", "chmod 755 /opt/stand-in/sinfo; chown admin /home/admin/.ssh/id_ed25519")
        copy(node, MUNGE_KEY, KEY)
        head.run("bash", "-s", stdin=files["install.sh"])
        services = head.run("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert all(f"programs.py {name} " in services for name in ("controller", "observer", "agent-secrets"))
        head.run("sh", "-c", f"su - admin -c '{RUN_NODES}' > /dev/null 2>&1 < /dev/null &")
        eventually(lambda: head.run("sh", "-c", "cat /home/admin/nodes.rc || true"), timeout_s=3 * PATIENCE_S)
        said = head.run("cat", "/home/admin/nodes.log")
        assert (head.run("cat", "/home/admin/nodes.rc"), "compute-1/compute is set up" in said) == ("0\n", True), said
        assert "demo-login/login is set up" in said
        assert node.run("stat", "-c", "%a %U", PROLOG, "/var/lib/dalsegno/agents/compute-1") == "755 root\n600 root\n"
        for host in (node, login):
            assert host.run("/usr/local/bin/dalsegno", "--version") == head.run("/usr/local/bin/dalsegno", "--version")
            assert host.run("sh", "-c", f". {PROFILE}; echo $NCCL_IB_GID_INDEX") == "3\n"
        assert "programs.py" not in login.run("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"), "it has no daemon"
