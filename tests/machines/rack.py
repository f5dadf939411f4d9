"""Virtual machines on one network: the hosts of a cluster of `target: ssh`, each with its own kernel and systemd.

The network is a bridge in a network namespace of its own. The operator's commands run in that namespace, too. All
machines end with the process that started them.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.system.hanging_calls import die_with_parent
from tests.machines.host_disk import FIRST_HOST, HOSTS, NETWORK, HostDisk, mac
from tests.machines.qemu import accelerator
from tests.waiting import PATIENCE, eventually

BOOT_TIMEOUT_S = 900.0 * PATIENCE
COMMAND_TIMEOUT_S = 600.0 * PATIENCE
KERNEL = "root=/dev/vda rw console=ttyS0 quiet net.ifnames=0"
# The first process of the namespace. It creates the bridge and a tap device for each machine.
SWITCH = f"""
set -e
ip link set lo up
ip link add switch type bridge
ip address add {NETWORK}.1/24 dev switch
ip link set switch up
for number in $(seq {FIRST_HOST} {FIRST_HOST + HOSTS - 1}); do
    ip tuntap add tap$number mode tap
    ip link set tap$number master switch
    ip link set tap$number up
done
echo ready
read -r _
"""


@dataclass
class VirtualMachine:
    """One machine. `run` uses ssh as root, so the machine must have booted."""

    name: str
    number: int
    folder: Path
    disk: HostDisk
    enter: tuple[str, ...]  # the command prefix that enters the network
    machine: tuple[str, ...]  # the options of qemu that choose KVM or emulation
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    def power_on(self, cores: int = 2, memory_mib: int = 2048) -> None:
        """Start the machine with the disk that it had before, or a new one."""
        overlay, parent = self.folder / f"{self.name}.qcow2", os.getpid()
        if not overlay.exists():
            words = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(self.disk.image), str(overlay)]
            subprocess.run(words, check=True)
        argv = [
            *self.enter, "qemu-system-x86_64", *self.machine, "-smp", str(cores), "-m", str(memory_mib),
            "-display", "none", "-kernel", str(self.disk.kernel), "-initrd", str(self.disk.initrd),
            "-append", f"{KERNEL} systemd.hostname={self.name} systemd.machine_id={self.number:032x}",
            "-drive", f"file={overlay},format=qcow2,if=virtio,cache=unsafe",
            "-netdev", f"tap,id=n,ifname=tap{self.number},script=no,downscript=no",
            "-device", f"virtio-net-pci,netdev=n,mac={mac(self.number)}", "-device", "virtio-rng-pci",
            "-serial", f"file:{self.folder / f'{self.name}.console'}",
        ]  # fmt: skip
        errors = (self.folder / f"{self.name}.qemu").open("wb")
        self.process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stderr=errors, preexec_fn=lambda: die_with_parent(parent)
        )
        errors.close()

    def cut_power(self) -> None:
        """End the machine at once, without a signal to its programs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def try_run(self, command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "ConnectTimeout=20"]
        argv = [*self.enter, "ssh", "-F", "none", "-i", str(self.disk.key)]
        argv += [word for option in (*options, "BatchMode=yes") for word in ("-o", option)]
        return subprocess.run(
            [*argv, f"root@{self.address}", command], input=stdin, capture_output=True, text=True,
            timeout=COMMAND_TIMEOUT_S,
        )  # fmt: skip

    def run(self, *argv: str, stdin: str = "") -> str:
        """Run a command as root and return what it printed."""
        done = self.try_run(shlex.join(argv), stdin)
        assert done.returncode == 0, f"{argv} on {self.name}: {done.stdout}{done.stderr}"
        return done.stdout

    def shell(self, script: str) -> str:
        return self.run("sh", "-c", script)

    def wait_for_boot(self, other_than: str = "") -> str:
        """Wait until the machine has booted with another boot id than `other_than`, and return its boot id."""

        def booted() -> str:
            assert self.process is not None and self.process.poll() is None, f"the machine ended: {self.folder}"
            done = self.try_run("cat /proc/sys/kernel/random/boot_id && systemctl is-system-running --wait")
            found = done.stdout.split()
            return found[0] if len(found) > 1 and found[0] != other_than else ""

        return eventually(booted, timeout_s=BOOT_TIMEOUT_S, every_s=1)


@dataclass(frozen=True)
class MachineRack:
    """The machines, the operator's key, and the file with the host keys that the operator knows."""

    hosts: Sequence[VirtualMachine]
    key: Path
    known_hosts: Path
    enter: tuple[str, ...]

    def __getitem__(self, name: str) -> VirtualMachine:
        return next(host for host in self.hosts if host.name == name)


@contextmanager
def running_machines(disk: HostDisk, folder: Path, names: Sequence[str]) -> Iterator[MachineRack]:
    """Run machines on new copies of the disk, and end them completely. The folder keeps their consoles."""
    folder.mkdir(parents=True, exist_ok=True)
    parent, chosen = os.getpid(), accelerator(disk.kernel, disk.initrd)
    switch = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", SWITCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: die_with_parent(parent),
    )  # fmt: skip
    machines: list[VirtualMachine] = []
    try:
        assert switch.stdout and switch.stdout.readline() == "ready\n", "the network was not created"
        enter = ("nsenter", f"--net=/proc/{switch.pid}/ns/net", "--")
        for at, name in enumerate(names):
            machines.append(VirtualMachine(name, FIRST_HOST + at, folder, disk, enter, chosen.options))
            machines[-1].power_on()
        known_hosts = folder / "known_hosts"
        with known_hosts.open("w") as file:
            for machine in machines:
                machine.wait_for_boot()
                key = machine.run("cat", "/etc/ssh/key.pub").split()
                file.write(f"{machine.address} {key[0]} {key[1]}\n")
        yield MachineRack(machines, disk.key, known_hosts, enter)
    finally:
        for machine in machines:
            machine.cut_power()
            (folder / f"{machine.name}.qcow2").unlink(missing_ok=True)
        switch.kill()
        switch.wait()
