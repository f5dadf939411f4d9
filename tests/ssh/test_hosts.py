"""Tests of the virtual hosts themselves: they are independent of each other and of the machine, and leave nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.setup.inspect import HostFacts, inspect_hosts
from dalsegno.system.ssh import SshConnections
from tests.ssh.hosts import SOURCE, reason_to_skip
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "-")]


def test_hosts_are_independent_of_each_other_and_of_the_machine(ssh_hosts):
    rack = ssh_hosts(2)
    one, two = rack.hosts
    one.run("useradd", "--create-home", "only-here")
    one.run("sh", "-c", "echo changed > /usr/share/only-here; touch /var/lib/only-here; echo x > /dev/shm/only-here")
    one.run("sh", "-c", "dpkg --clear-selections; rm -rf /usr/games /var/lib/dpkg")
    assert one.run("id", "-u", "only-here").strip().isdigit()
    assert "only-here" not in two.run("cat", "/etc/passwd") + Path("/etc/passwd").read_text()
    for path in ("/usr/share/only-here", "/var/lib/only-here", "/home/only-here", "/dev/shm/only-here"):
        assert one.run("ls", "-d", path) and not Path(path).exists()
        assert two.run("sh", "-c", f"ls {path} 2>/dev/null || true") == ""
    assert two.run("dpkg-query", "-W", "-f", "${Status}", "bash") == "install ok installed"
    assert {one.run("hostname"), two.run("hostname")} == {"host-1\n", "host-2\n"}
    assert one.run("cat", "/etc/machine-id") != two.run("cat", "/etc/machine-id")
    assert "sshd" in one.run("ps", "-e") and len(one.run("ps", "-e").splitlines()) < 8


def test_facts_of_hosts_over_ssh(ssh_hosts):
    rack = ssh_hosts(3)
    rack["host-2"].run("sh", "-c", "mkdir -p /etc/slurm; echo '# of somebody else' > /etc/slurm/slurm.conf")
    rack.power_off("host-3")
    with SshConnections(rack.addresses("admin"), known_hosts=rack.known_hosts, connect_timeout_s=3) as ssh:
        found = inspect_hosts(ssh, rack.names, ["bash"])
    first, second, third = (found[name] for name in rack.names)
    assert isinstance(first, HostFacts) and isinstance(second, HostFacts) and not isinstance(third, HostFacts)
    assert first.is_root and first.hostname == "host-1" and rack["host-1"].address in first.addresses
    assert first.version_of("bash") and "sshd" in first.daemons and abs(first.clock_offset_s) < 5
    assert (first.slurm_conf, second.slurm_conf) == ("", "/etc/slurm/slurm.conf")
    assert second.slurm_conf_head == "# of somebody else"
    assert {user.name for user in first.users} >= {"admin", "asks", "plain"}
    assert first.machine_id != second.machine_id and first.free_mib("/var/lib") and not first.record


STARTED_AND_KILLED = """
import sys
from pathlib import Path
from tests.ssh.hosts import running_hosts
with running_hosts(2, Path(sys.argv[1])) as rack:
    print(rack.cable, rack.switch, *[host.pid for host in rack.hosts], flush=True)
    sys.stdin.read()
"""


def test_hosts_end_with_the_process_that_created_them(tmp_path):
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}:{SOURCE.parent}"}
    argv = [sys.executable, "-c", STARTED_AND_KILLED, str(tmp_path / "hosts")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as owner:
        assert owner.stdout
        cable, *pids = owner.stdout.readline().split()
        assert Path("/sys/class/net", cable).exists() and len(pids) == 3
        owner.kill()
    eventually(lambda: not any(Path("/proc", pid).exists() for pid in pids))
    eventually(lambda: not Path("/sys/class/net", cable).exists())
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
