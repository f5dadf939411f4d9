"""Virtual hosts with a real sshd each, for tests of everything that reaches hosts over SSH.

Each host has its own network, PID, mount, IPC and UTS namespace, its own cgroup folder, and a writable layer in memory
above the machine's `/usr`, `/etc` and `/var`. So users, packages and daemons on one host do not affect another host or
the machine. `/home`, `/root`, `/opt`, `/run`, `/tmp` and `/dev/shm` start empty. There is no systemd.
`tests/ssh/host_program.py` is the program that runs them. All hosts end with the process that created them.
"""

from __future__ import annotations

import ipaddress
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dalsegno.system.cgroups import read_cgroups, remove_cgroup
from dalsegno.system.network import used_networks
from dalsegno.system.passwords import bcrypt_hash
from dalsegno.system.processes import LocalRunner
from dalsegno.system.ssh import SshAddress
from tests.waiting import eventually

PROGRAM = Path(__file__).with_name("host_program.py")
SOURCE = Path(__file__).parents[2] / "src"
MOST = 40
BITS = 24
DISK_MIB = 2048
SUDO_PASSWORD = "correct horse 'battery' staple"
CGROUP_MARK = "dalsegno-ssh-test-"
# `admin` needs no password for sudo, `asks` needs SUDO_PASSWORD, `plain` may not use sudo.
USERS = {"admin": "ALL=(ALL) NOPASSWD: ALL", "asks": "ALL=(ALL) ALL", "plain": ""}
FIRST_UID = 4200


@dataclass(frozen=True)
class VirtualHost:
    """One host. `pid` is its first process as the machine sees it."""

    name: str
    address: str
    pid: int
    port: str  # the host's port on the switch

    def run(self, *argv: str, stdin: str = "") -> str:
        """Run a command inside the host without SSH, as root, and return what it printed."""
        done = subprocess.run(
            ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "-r", "-w", "--", *argv],
            input=stdin, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, f"{argv} on {self.name}: {done.stdout}{done.stderr}"
        return done.stdout


@dataclass(frozen=True)
class HostRack:
    """The hosts, the operator's key, and the file with the host keys that the operator knows."""

    hosts: Sequence[VirtualHost]
    key: Path
    known_hosts: Path
    switch: int  # the process in whose network namespace the switch is
    cable: str  # the machine's interface on the hosts' network

    def __getitem__(self, name: str) -> VirtualHost:
        return next(host for host in self.hosts if host.name == name)

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]

    def addresses(self, user: str = "root", jump: str = "") -> list[SshAddress]:
        return [SshAddress(host.name, host.address, user, key=str(self.key), jump=jump) for host in self.hosts]

    def cut(self, name: str) -> None:
        """Take the link of a host down, as if its cable was unplugged."""
        self._ip("link", "set", self[name].port, "down")

    def join(self, name: str) -> None:
        """Plug the cable of a host in again."""
        self._ip("link", "set", self[name].port, "up")

    def hide(self, name: str) -> None:
        """Make a host unreachable from the machine. The other hosts still reach it."""
        nowhere = str(ipaddress.ip_address(self.hosts[0].address) + 200)
        subprocess.run(
            ["ip", "route", "add", f"{self[name].address}/32", "via", nowhere, "dev", self.cable], check=True
        )

    def kill_sshd(self, name: str) -> None:
        """Kill sshd and all its sessions."""
        host = self[name]
        host.run("sh", "-c", "kill -9 $(pidof sshd) 2>/dev/null; true")

    def start_sshd(self, name: str, *options: str) -> None:
        self[name].run("/usr/sbin/sshd", *options)
        _wait_for_sshd(self[name].address)

    def power_off(self, name: str) -> None:
        """Cut the host off, then kill all its processes."""
        self.cut(name)
        os.kill(self[name].pid, signal.SIGKILL)

    def _ip(self, *words: str) -> None:
        subprocess.run(["nsenter", "-t", str(self.switch), "-n", "ip", *words], check=True)


def reason_to_skip() -> str:
    """Return why virtual hosts cannot run here, or an empty string."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("sshd", "sudo", "ssh-keygen", "ip", "nsenter") if not _program(name)]
    return f"needs {', '.join(missing)}" if missing else ""


@contextmanager
def running_hosts(
    count: int,
    folder: Path,
    names: Sequence[str] = (),
    disk_mib: int = DISK_MIB,
    shared: Path | None = None,
    root: Path = Path("/"),
) -> Iterator[HostRack]:
    """Run `count` hosts named host-1 … (or `names`), and end them completely. All of them see the folder `shared` of
    the machine at /shared. `root` is the folder with their system, by default the machine's own."""
    assert 1 <= count <= MOST
    names = list(names) or [f"host-{number}" for number in range(1, count + 1)]
    folder.mkdir(parents=True, exist_ok=True)
    key = folder / "operator-key"
    make_key(key)
    network = _free_network()
    addresses = list(network.hosts())
    tag, tree = os.urandom(3).hex(), read_cgroups()
    cgroup = f"{tree.root}/{CGROUP_MARK}{os.getpid()}-{tag}" if tree.root else ""
    _sweep(tree.root)
    hosts = []
    for number, name in enumerate(names):
        place = folder / name
        place.mkdir()
        make_key(place / "host-key", comment=f"root@{name}")
        hosts.append({
            "name": name, "address": str(addresses[10 + number]), "folder": str(place), "disk_mib": disk_mib,
            "log": str(folder / f"{name}.log"), "cgroup": f"{cgroup}/{name}",
            "private_key": (place / "host-key").read_text(), "public_key": (place / "host-key.pub").read_text(),
        })  # fmt: skip
    known_hosts = folder / "known_hosts"
    known_hosts.write_text("".join(f"{each['address']} {each['public_key']}" for each in hosts))
    password = bcrypt_hash(SUDO_PASSWORD)
    plan = {
        "hosts": hosts, "cable": f"dss{tag}", "operator": str(addresses[0]), "bits": BITS, "port": 22,
        "shared": str(shared) if shared else "",
        "root": str(root),
        "cgroups": tree.root, "unified": tree.version == 2, "authorized_key": (folder / "operator-key.pub").read_text(),
        "users": [
            {"name": name, "uid": FIRST_UID + at, "sudoers": rule, "password": password}
            for at, (name, rule) in enumerate(USERS.items())
        ],
    }  # fmt: skip
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    errors = (folder / "program.log").open("w+")
    program = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        text=True, env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    pids: list[int] = []
    try:
        assert program.stdout
        for each in hosts:
            name, _, pid = program.stdout.readline().strip().partition(" ")
            assert name == each["name"], f"the hosts did not start: {(folder / 'program.log').read_text()}"
            pids.append(int(pid))
        found = [VirtualHost(each["name"], each["address"], pids[at], f"port{at}") for at, each in enumerate(hosts)]
        for host in found:
            _wait_for_sshd(host.address)
        yield HostRack(found, key, known_hosts, program.pid, str(plan["cable"]))
    finally:
        program.kill()
        program.wait()
        errors.close()
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        if cgroup:
            remove_cgroup(Path(cgroup))


@pytest.fixture
def ssh_hosts(tmp_path: Path) -> Iterator[Callable[[int], HostRack]]:
    """Return a function that starts a number of hosts for this test."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    from contextlib import ExitStack

    with ExitStack() as stack:
        yield lambda count: stack.enter_context(running_hosts(count, tmp_path / "hosts"))


def make_key(path: Path, comment: str = "operator") -> None:
    """Create an SSH key without passphrase, and its public half beside it."""
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)


def _wait_for_sshd(address: str) -> None:
    def answers() -> bool:
        with socket.create_connection((address, 22), timeout=2) as sock:
            return sock.recv(4) == b"SSH-"

    eventually(answers, every_s=0.02)


def _free_network() -> ipaddress.IPv4Network:
    used = used_networks(LocalRunner())
    numbers = random.SystemRandom().sample(range(256), 256)
    networks = (ipaddress.IPv4Network(f"10.213.{number}.0/{BITS}") for number in numbers)
    return next(each for each in networks if not any(each.overlaps(other) for other in used))


def _sweep(root: str) -> None:
    """Remove cgroup folders of test processes that were killed."""
    for path in Path(root).glob(f"{CGROUP_MARK}*") if root else ():
        pid = path.name.removeprefix(CGROUP_MARK).partition("-")[0]
        if not Path("/proc", pid).exists():
            remove_cgroup(path)


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
