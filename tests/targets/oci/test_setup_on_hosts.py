"""The scripts of an OCI cluster on two virtual hosts: a controller and a compute node, whose agent connects."""

from __future__ import annotations

import base64

import pytest

from dalsegno.setup.bootstrap import PYTHON
from dalsegno.setup.delivery import find_bundle
from dalsegno.targets.cloud.agent_secrets import MUNGE_KEY, agent_secret
from dalsegno.targets.oci.node_plans import CUSTOM_ROLE, PROFILE, PROLOG, install_script, setup_files
from tests.ssh.hosts import VirtualHost, reason_to_skip, running_hosts
from tests.targets.cloud.test_bootstrap import ASK
from tests.targets.oci.conftest import cluster_of
from tests.waiting import eventually

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
