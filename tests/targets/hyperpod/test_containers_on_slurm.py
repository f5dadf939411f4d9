"""Containers on HyperPod: the lifecycle script on virtual hosts with a real slurmctld, whose files slurmd gets."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.setup.delivery import find_bundle
from dalsegno.spec.facts import Cluster
from dalsegno.targets.hyperpod.answers import SlurmRole
from dalsegno.targets.hyperpod.node_plans import role_plan
from tests.ssh.hosts import HostRack, VirtualHost, reason_to_skip, running_hosts
from tests.targets.hyperpod.conftest import CPU, cluster_of
from tests.targets.hyperpod.test_script_on_host import USERS, run_twice
from tests.waiting import eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "-"),
]
THEIRS = "# The line of HyperPod's own plugin is here.\n"
CONF = """\
ClusterName=demo
SlurmctldHost=head
SlurmUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldParameters=enable_configless
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdLogFile=/var/log/slurmd.log
NodeName=node-1 CPUs=1 State=UNKNOWN
PartitionName=dev Nodes=ALL Default=YES
"""
# HyperPod has Slurm in /opt/slurm, and each instance has its own.
SLURM = """
mkdir -p /opt/slurm/etc /opt/slurm/lib /opt/slurm/include /run/munge /var/log/munge /var/lib/munge
ln -s /usr/bin /usr/sbin /opt/slurm/
mv "$(readlink -f /usr/include/slurm)" /opt/slurm/include/slurm
chown -R munge: /etc/munge /run/munge /var/log/munge /var/lib/munge
chmod 755 /run/munge
setpriv --reuid=munge --regid=munge --clear-groups munged
"""
IMAGE = """
mkdir -p /root/image/bin /root/image/etc
cp /usr/bin/busybox /root/image/bin/sh
echo 'the image' > /root/image/etc/where
mksquashfs /root/image /srv/image.sqsh -quiet -no-progress > /dev/null
chown ann /srv/image.sqsh
"""
RESTART = """\
#!/bin/sh
# Stands in for systemd, which the virtual hosts do not have.
[ "$*" = "restart slurmd" ] && exec slurmd --conf-server head
"""
STEP = "srun --container-image=/srv/image.sqsh sh -c 'read line < /etc/where; echo $line'"


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[HostRack]:
    """A controller, a compute node and a login node, as HyperPod's image starts them.

    The slurmd of the login node gets Slurm's files and ends, because slurm.conf does not name the node.
    """
    with running_hosts(3, tmp_path / "hosts", ["head", "node-1", "login"]) as rack:
        known = "".join(f"{host.address} {host.name}\n" for host in rack.hosts)
        for host in rack.hosts:
            host.run("sh", "-c", "cat >> /etc/hosts", stdin=known)
            key = base64.b64encode(b"k" * 128).decode()
            host.run("sh", "-c", "umask 077; base64 -d > /etc/munge/munge.key", stdin=key)
            host.run("sh", "-ec", SLURM)
        head, node, login = rack.hosts
        head.run("sh", "-c", "cat > /opt/slurm/etc/slurm.conf", stdin=CONF)
        head.run("sh", "-c", "cat > /opt/slurm/etc/plugstack.conf", stdin=THEIRS)
        head.run("sh", "-ec", "mkdir /var/spool/slurmctld; slurmctld -f /opt/slurm/etc/slurm.conf")
        eventually(lambda: "is UP" in slurm(head, "scontrol ping || true"))
        node.run("slurmd", "--conf-server", "head")
        login.run("sh", "-c", "cat > /usr/local/bin/systemctl; chmod 755 /usr/local/bin/systemctl", stdin=RESTART)
        login.run("sh", "-c", "systemctl restart slurmd || true")
        eventually(lambda: "idle" in slurm(head, "sinfo --noheader --format=%T"))
        yield rack


def slurm(host: VirtualHost, command: str, user: str = "root") -> str:
    """Run a command with the settings that the Slurm of /opt/slurm uses by default."""
    find = "for conf in /opt/slurm/etc /run/slurm/conf; do [ -e $conf/slurm.conf ] && break; done"
    run = f"{find}; SLURM_CONF=$conf/slurm.conf; export SLURM_CONF; {command}"
    return host.run("runuser", "-u", user, "--", "sh", "-c", run)


def set_up(host: VirtualHost, cluster: Cluster, role: SlurmRole) -> tuple[str, str]:
    return run_twice(host, role_plan(cluster, role, find_bundle().key), cluster, role)


def test_step_of_a_user_runs_in_its_image_after_the_lifecycle_scripts(rack: HostRack, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DALSEGNO_RETRY_S", "1")
    head, node, login = rack.hosts
    cluster = cluster_of(CPU, "", f"{USERS}containers: {{enabled: true}}\n")
    set_up(node, cluster, SlurmRole.COMPUTE)
    assert "container" not in node.run("cat", "/run/slurm/conf/plugstack.conf"), "the controller has no line yet"
    first, again = set_up(head, cluster, SlurmRole.CONTROLLER)
    assert "plugstack.conf now has `optional /usr/local/lib/dalsegno/plugin/dalsegno_container.so" in first
    assert "plugstack.conf" not in again
    stack = head.run("cat", "/opt/slurm/etc/plugstack.conf")
    assert stack.startswith(THEIRS) and stack.count("dalsegno_container.so") == 1
    eventually(lambda: node.run("grep", "dalsegno_container", "/run/slurm/conf/plugstack.conf"))
    set_up(login, cluster, SlurmRole.LOGIN)
    node.run("sh", "-ec", IMAGE)
    for host in (head, login):
        assert slurm(host, f"cd /; {STEP}", "ann") == "the image\n"
    node.run("mv", "/usr/local/lib/dalsegno/plugin", "/root/plugin")
    assert slurm(head, "cd /; srun hostname") == "node-1\n", "a new instance runs jobs before it has the plugin"
    assert "--auto-resume" not in slurm(head, "srun --help"), "HyperPod's own plugin has this option"
