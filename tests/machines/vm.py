"""A Debian 12 virtual machine with systemd and cgroup v2, as most people have it.

`python -m tests.machines.vm build` makes the disk, `boot` starts the machine, `push` copies this clone into it, `ssh
COMMAND...` runs a command there and `stop` ends it. The machine uses KVM if that boots its kernel (`qemu.py`).
Otherwise it is emulated, and 10 to 20 times slower than its host. So everything it needs is installed from outside, in
a chroot, before its first boot. All files are below the folder $DALSEGNO_MACHINES, by default in the user's cache.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.machines.chroot import CLONE, CLONE_THERE, MIRROR, folder, local_indexes, run
from tests.machines.qemu import accelerator

SUITE = "bookworm"
PACKAGES = (
    "systemd-sysv,dbus,udev,kmod,sudo,openssh-server,linux-image-cloud-amd64,python3,python3-venv,git,ca-certificates,"
    "iproute2,procps,libpam-systemd,dbus-user-session,polkitd,nfs-kernel-server"
)
DISK_GIB = 14
BOOT_TIMEOUT_S = 600.0

# The machine's sudo user and plain user; `up` is also run as root. Test clusters use other user names, because their
# accounts must not exist on the machine.
SUDOER, PLAIN = "olga", "paul"

# The init for a machine without systemd. It does what the init of a container or a small distribution does, and nothing
# else.
PLAIN_INIT = """#!/bin/sh
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mount -o remount,rw /
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t tmpfs -o mode=755 tmpfs /run
mountpoint -q /dev || mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm /run/sshd
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts; mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t cgroup2 cgroup2 /sys/fs/cgroup
hostname plain; modprobe virtio_net; ip link set lo up
device=$(ls /sys/class/net | grep -v '^lo$' | head -n 1)
ip address add 10.0.2.15/24 dev "$device"; ip link set "$device" up; ip route add default via 10.0.2.2
/usr/sbin/sshd -e
while :; do sleep 1; done
"""
NETWORK = "[Match]\nName=e*\n[Network]\nAddress=10.0.2.15/24\nGateway=10.0.2.2\n"


# Build ------------------------------------------------------------------------------------------------------


def build() -> None:
    """Create the disk, unless one exists that has everything the clone needs now. The machine has no network to install
    more.

    An interrupted build continues after its last complete step.
    """
    vm = folder() / "vm"
    needed, installed = f"{PACKAGES}\n{(CLONE / 'pyproject.toml').read_text()}", vm / "installed"
    if (vm / "disk.img").exists() and installed.exists() and installed.read_text() == needed:
        return
    root, bare = vm / "root", vm / "bare"
    if not bare.exists():
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), MIRROR])
        bare.touch()
    take_settings(root)
    configure(root, vm)
    copy_clone(root)
    in_chroot(root, f"cd {CLONE_THERE} && ./dalsegno setup --dev --torch")
    for name in ("vmlinuz", "initrd.img"):
        shutil.copy((root / name).resolve() if (root / name).is_symlink() else root / name, vm / name)
    disk = vm / "disk.new"
    disk.unlink(missing_ok=True)
    with disk.open("wb") as file:
        file.truncate(DISK_GIB << 30)
    run(["mke2fs", "-q", "-F", "-t", "ext4", "-d", str(root), str(disk)])
    disk.rename(vm / "disk.img")
    installed.write_text(needed)
    shutil.rmtree(root)
    bare.unlink()


def take_settings(root: Path, suite: str = SUITE) -> None:
    """Copy this machine's package sources, name server and certificates, because it may be behind a proxy."""
    for path in ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt"):
        if Path(path).exists():
            shutil.copy(path, root / path[1:])
    for file in Path("/etc/apt/apt.conf.d").glob("99*"):
        shutil.copy(file, root / "etc/apt/apt.conf.d")
    (root / "etc/apt/sources.list").write_text(
        f"deb {MIRROR} {suite} main\ndeb {MIRROR} {suite}-updates main\ndeb {MIRROR}-security {suite}-security main\n"
    )


def configure(root: Path, vm: Path) -> None:
    """Write accounts, network, ssh keys and the init of the machine without systemd."""
    key = vm / "key"
    if not key.exists():
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)])
    for user in (SUDOER, PLAIN):
        in_chroot(root, f"id {user} 2>/dev/null || useradd -m -s /bin/bash {user}")
    in_chroot(root, "systemctl enable systemd-networkd ssh")
    put(root / f"etc/sudoers.d/{SUDOER}", f"{SUDOER} ALL=(ALL) NOPASSWD: ALL\n", 0o440)
    for home in ("root", f"home/{SUDOER}", f"home/{PLAIN}"):
        put(root / home / ".ssh/authorized_keys", key.with_suffix(".pub").read_text())
        in_chroot(root, f"chown -R --reference=/{home} /{home}/.ssh && chmod 700 /{home}/.ssh")
    put(root / "etc/systemd/network/10-wired.network", NETWORK)
    put(root / "etc/fstab", "/dev/vda / ext4 defaults 0 0\n")
    put(root / "etc/hostname", "machine\n")
    put(root / "etc/hosts", "127.0.0.1 localhost machine plain\n")
    put(root / "usr/local/sbin/plain-init", PLAIN_INIT, 0o755)
    put(root / "etc/ssh/sshd_config.d/slow.conf", "LoginGraceTime 0\nUseDNS no\n")


def put(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def copy_clone(root: Path) -> None:
    there = root / CLONE_THERE[1:]
    there.mkdir(parents=True, exist_ok=True)
    run(["sh", "-c", f"{shlex.join(clone_archive())} | tar -x -C {shlex.quote(str(there))} --no-same-owner"])


def clone_archive() -> list[str]:
    """Return the command that writes the clone's tracked and new files as a tar archive."""
    listed = "git ls-files -z --cached --others --exclude-standard --deduplicate"
    packed = f"{listed} | tar -c --null --ignore-failed-read -T - 2>/dev/null"
    return ["sh", "-c", f"cd {shlex.quote(str(CLONE))} && {packed}"]


def in_chroot(root: Path, script: str) -> None:
    """Run a shell script in the new root, in new namespaces, so that its mounts and processes end with it."""
    where = shlex.quote(str(root))
    mounts = [f"-t proc proc {where}/proc", f"--rbind /dev {where}/dev", f"-t sysfs sysfs {where}/sys"]
    mounts += [f"-m --bind {path} {where}{path}" for path in local_indexes()]
    prepare = "".join(f"mount {words}; " for words in mounts)
    enter = f"exec chroot {where} /bin/bash -ec {shlex.quote(script)}"
    run(["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", prepare + enter])


# Run --------------------------------------------------------------------------------------------------------


class Machine:
    """The virtual machine, from boot to power-off."""

    def __init__(self, name: str = "vm", port: int = 2201) -> None:
        self.vm = folder() / "vm"
        self.run_folder = folder() / name
        self.port = port

    def boot(self, *, systemd: bool = True, cores: int = 2, memory_gib: int = 6) -> None:
        """Start the machine on a copy-on-write copy of the disk, and wait until it answers."""
        self.run_folder.mkdir(parents=True, exist_ok=True)
        overlay, disk = self.run_folder / "overlay.qcow2", self.vm / "disk.img"
        if not overlay.exists() or overlay.stat().st_mtime < disk.stat().st_mtime:
            run(["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(disk), str(overlay)])
        kernel_file, initrd = self.vm / "vmlinuz", self.vm / "initrd.img"
        kernel = "root=/dev/vda rw console=ttyS0 quiet" + ("" if systemd else " init=/usr/local/sbin/plain-init")
        run(
            [
                *("nice", "-n", "10", "qemu-system-x86_64", *accelerator(kernel_file, initrd).options),
                *("-smp", str(cores), "-m", f"{memory_gib}G", "-display", "none", "-daemonize"),
                *("-kernel", str(kernel_file), "-initrd", str(initrd), "-append", kernel),
                *("-drive", f"file={overlay},format=qcow2,if=virtio,cache=unsafe"),
                *("-netdev", f"user,id=n,restrict=on,hostfwd=tcp:127.0.0.1:{self.port}-:22"),
                *("-device", "virtio-net-pci,netdev=n", "-device", "virtio-rng-pci"),
                *("-pidfile", str(self.run_folder / "pid"), "-serial", f"file:{self.run_folder / 'console'}"),
            ]
        )
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while self.ssh("true", output=subprocess.DEVNULL).returncode:
            if time.monotonic() > deadline:
                sys.exit(f"the machine does not answer; its console: {self.run_folder / 'console'}")
            time.sleep(1)

    def ssh(
        self, command: str, user: str = "root", *, output: int | None = None, stdin: int = subprocess.DEVNULL
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a shell command there as this user. `output` receives its stdout and stderr."""
        options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "ConnectTimeout=20"]
        argv = ["ssh", "-i", str(self.vm / "key"), "-p", str(self.port)]
        argv += [word for option in options for word in ("-o", option)]
        streams = {"stdin": stdin, "stdout": output, "stderr": output}
        return subprocess.run([*argv, f"{user}@127.0.0.1", command], check=False, **streams)

    def push(self) -> None:
        """Copy this clone into the machine; files deleted here stay there."""
        with subprocess.Popen(clone_archive(), stdout=subprocess.PIPE) as packed:
            assert packed.stdout is not None
            done = self.ssh(f"tar -x -C {CLONE_THERE} --no-same-owner", stdin=packed.stdout.fileno())
        if done.returncode:
            sys.exit("could not copy the clone")

    def stop(self) -> None:
        """Power the machine off as with its switch, and discard the changes on its disk."""
        pid_file = self.run_folder / "pid"
        if pid_file.exists():
            command = Path(f"/proc/{int(pid_file.read_text())}/cmdline")
            if command.exists() and str(self.run_folder).encode() in command.read_bytes():
                os.kill(int(command.parent.name), signal.SIGTERM)
        shutil.rmtree(self.run_folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "boot", "push", "ssh", "stop"))
    parser.add_argument("--no-systemd", action="store_true", help="boot with a minimal init")
    parser.add_argument("--user", default="root")
    parser.add_argument("--port", type=int, default=2201)
    parser.add_argument("--name", default="run")
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    machine = Machine(asked.name, asked.port)
    if asked.what == "build":
        build()
    elif asked.what == "boot":
        build()
        machine.boot(systemd=not asked.no_systemd)
    elif asked.what == "push":
        machine.push()
    elif asked.what == "ssh":
        sys.exit(machine.ssh(" ".join(asked.words), asked.user).returncode)
    else:
        machine.stop()


if __name__ == "__main__":
    main()
