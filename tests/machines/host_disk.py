"""Disks of bare Debian hosts with systemd, for virtual machines that `target: ssh` sets up.

The disk of a release has an ssh server, Python and sudo. The packages that `up` installs are downloaded and not
installed, so that the hosts install them without a network. A machine gets its host name from its kernel command line,
its address by the number in its MAC address, and a host key of its own when it first boots. Disks are below
$DALSEGNO_MACHINES. Building one needs root, debootstrap and a network.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.machines.chroot import MIRROR, folder, run
from tests.machines.vm import in_chroot, put, take_settings

BASE = (
    "systemd-sysv,systemd-timesyncd,dbus,udev,kmod,sudo,openssh-server,linux-image-cloud-amd64,python3,ca-certificates,"
    "iproute2,procps,libpam-systemd,zstd"
)
# What `up` installs on the hosts of the tests.
CLUSTER = (
    "munge slurm-client slurm-wlm-basic-plugins slurmd slurmctld slurmdbd slurm-wlm-mysql-plugin mariadb-server "
    "nfs-kernel-server nfs-common"
)
DISK_GIB = 6
NETWORK = "10.213.0"  # only in the network namespace of the machines
ADMIN = "admin"  # may use sudo without a password
FIRST_HOST, HOSTS = 11, 3
SSH_UNIT = """[Service]
ExecStartPre=
ExecStartPre=/bin/sh -c 'test -e /etc/ssh/key || ssh-keygen -q -t ed25519 -N "" -f /etc/ssh/key'
ExecStartPre=/usr/sbin/sshd -t
"""


@dataclass(frozen=True)
class HostDisk:
    """The folder of a release's disk, kernel, and the operator's key."""

    place: Path

    @property
    def image(self) -> Path:
        return self.place / "disk.img"

    @property
    def kernel(self) -> Path:
        return self.place / "vmlinuz"

    @property
    def initrd(self) -> Path:
        return self.place / "initrd.img"

    @property
    def key(self) -> Path:
        return self.place / "key"


def mac(number: int) -> str:
    return f"52:54:00:00:00:{number:02x}"


def build_disk(release: str) -> HostDisk:
    """Return the disk of a release. It is built if it does not exist or if this file names other packages now."""
    disk = HostDisk(folder() / f"host-{release}")
    needed, installed = f"{BASE} {CLUSTER} {SSH_UNIT}", disk.place / "installed"
    if disk.image.exists() and installed.exists() and installed.read_text() == needed:
        return disk
    shutil.rmtree(disk.place, ignore_errors=True)
    root = disk.place / "root"
    root.mkdir(parents=True)
    run(["debootstrap", "--variant=minbase", f"--include={BASE}", release, str(root), MIRROR])
    take_settings(root, release)
    in_chroot(root, f"apt-get -qq update; apt-get -qq -y --no-install-recommends --download-only install {CLUSTER}")
    _configure(root, disk)
    for path in (disk.kernel, disk.initrd):
        shutil.copy((root / path.name).resolve(), path)
    with disk.image.open("wb") as file:
        file.truncate(DISK_GIB << 30)
    run(["mke2fs", "-q", "-F", "-t", "ext4", "-d", str(root), str(disk.image)])
    shutil.rmtree(root)
    installed.write_text(needed)
    return disk


def _configure(root: Path, disk: HostDisk) -> None:
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(disk.key)])
    in_chroot(root, f"useradd -m -s /bin/bash {ADMIN}; systemctl enable systemd-networkd ssh")
    put(root / f"etc/sudoers.d/{ADMIN}", f"{ADMIN} ALL=(ALL) NOPASSWD: ALL\n", 0o440)
    for home in ("root", f"home/{ADMIN}"):
        put(root / home / ".ssh/authorized_keys", disk.key.with_suffix(".pub").read_text())
        in_chroot(root, f"chown -R --reference=/{home} /{home}/.ssh && chmod 700 /{home}/.ssh")
    for number in range(FIRST_HOST, FIRST_HOST + HOSTS):
        matched = f"[Match]\nMACAddress={mac(number)}\n[Network]\nAddress={NETWORK}.{number}/24\n"
        put(root / f"etc/systemd/network/{number}.network", matched)
    put(root / "etc/fstab", "/dev/vda / ext4 defaults 0 0\n")
    put(root / "etc/hosts", "127.0.0.1 localhost\n")
    put(root / "etc/resolv.conf", "")
    put(root / "etc/machine-id", "")  # each machine writes its own when it boots
    (root / "etc/hostname").unlink(missing_ok=True)
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    put(root / "etc/systemd/system/ssh.service.d/host-key.conf", SSH_UNIT)
    put(root / "etc/ssh/sshd_config.d/host.conf", "HostKey /etc/ssh/key\nLoginGraceTime 0\nUseDNS no\n")
