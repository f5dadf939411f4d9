"""Debian 12 with systemd as its first process, at full speed: a container on the cgroups that this machine has.

On a machine with cgroup v2, this is what most people have. With v1, it tests the hybrid form. `python -m
tests.machines.container build` makes its root folder below $DALSEGNO_MACHINES, `fresh` makes it again, `push` copies
this clone into it, and `run USER COMMAND...` boots it and runs a command in a login session. All of it needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.machines.chroot import CLONE_THERE, ENTER_CGROUPS, Chroot, environment, folder, own_cgroups
from tests.machines.vm import PLAIN, SUDOER

PACKAGES = "systemd systemd-sysv dbus libpam-systemd sudo iproute2 procps python3 python3-venv git"
BOOT_TIMEOUT_S = 60.0

# Devices, kernel settings and mounts belong to the machine outside, so nothing in the container may change them.
MASKED = (
    *("systemd-udevd.service", "systemd-udev-trigger.service", "systemd-udevd-kernel.socket"),
    *(
        "systemd-udevd-control.socket",
        "systemd-modules-load.service",
        "systemd-sysctl.service",
        "systemd-binfmt.service",
    ),
    *("systemd-remount-fs.service", "systemd-random-seed.service", "kmod-static-nodes.service"),
    *("systemd-tmpfiles-setup-dev.service", "systemd-tmpfiles-setup.service", "systemd-networkd.service"),
    *(
        "systemd-resolved.service",
        "systemd-timesyncd.service",
        "getty.target",
        "getty@.service",
        "console-getty.service",
    ),
    *("dev-hugepages.mount", "dev-mqueue.mount", "sys-kernel-config.mount", "sys-kernel-debug.mount"),
    *("sys-kernel-tracing.mount", "sys-fs-fuse-connections.mount", "proc-sys-fs-binfmt_misc.automount", "tmp.mount"),
)
TARGET = """[Unit]
Requires=basic.target
Wants=dbus.service systemd-logind.service systemd-user-sessions.service
After=basic.target dbus.service
"""

# Runs as the first process of the namespaces and becomes systemd. $1: the root folder; $2: the folders that stand in
# for the machine's cgroup hierarchies. It waits until its parent has left these folders, because a folder with
# processes cannot enable controllers for its children.
ENTER = r"""
set -eu
root=$1 cgroups=$2
echo entered
read -r _
exec </dev/null
mount --make-rprivate /
mount --bind "$root" "$root"
cd "$root"
mount -t sysfs sysfs sys
mount -t tmpfs -o mode=755 cgroup sys/fs/cgroup
for folder in $cgroups; do
    mkdir -p ".${folder%/*}"
    mount --bind "$folder" ".${folder%/*}"
done
mount --rbind /dev dev
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts dev/pts
mount --bind dev/pts/ptmx dev/ptmx
mount -t tmpfs -o mode=1777 shm dev/shm
mount -t tmpfs -o mode=755 run run
mount -t tmpfs -o mode=1777 tmp tmp
mkdir run/lock
hostname container
ip link set lo up
ip link add eth0 type veth peer name eth0-peer # getaddrinfo() asks for an address beside loopback's
ip address add 198.18.0.1/24 dev eth0
ip link set eth0 up
ip link set eth0-peer up
mount -t proc proc proc
mkdir -p .old
pivot_root . .old
umount -l /.old
exec env -i container=dalsegno PATH="$PATH" /lib/systemd/systemd --unit=container.target
"""


class Container(Chroot):
    """The container, from its root folder to its end."""

    def __init__(self) -> None:
        super().__init__("bookworm")
        self.root = folder() / "container"

    def configure(self, root: Path) -> None:
        """Write what systemd reads at boot."""
        super().configure(root)
        (root / "etc/hostname").write_text("container\n")
        (root / "etc/hosts").write_text("127.0.0.1 localhost container\n")
        (root / "etc/fstab").write_text("")
        units = root / "etc/systemd/system"
        units.mkdir(parents=True, exist_ok=True)
        (units / "container.target").write_text(TARGET)
        for unit in MASKED:
            (units / unit).symlink_to("/dev/null")

    def set_up(self, log: Path | None = None) -> int:
        """Install systemd, make the users, and run the clone's own set-up."""
        script = (
            f"cd / && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y {PACKAGES} &&"
            f" for user in {SUDOER} {PLAIN}; do id $user >/dev/null 2>&1 || useradd -m -s /bin/bash $user; done &&"
            f" echo '{SUDOER} ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/{SUDOER} && chmod 440 /etc/sudoers.d/{SUDOER} &&"
            f" cd {CLONE_THERE} && ./dalsegno setup --dev --torch"
        )
        return self.run(["bash", "-c", script], network=True, log=log)

    @contextmanager
    def booted(self) -> Iterator[Booted]:
        """Boot the container. Afterwards, end it with everything that it has started."""
        namespaces = ["--mount", "--pid", "--uts", "--ipc", "--net", "--fork", "--kill-child"]
        with own_cgroups(f"dalsegno-container-{os.getpid()}") as cgroups:
            folders = [Path(each) for each in cgroups.split()]
            pass_controllers_on(folders)
            enter = ["unshare", *namespaces, "sh", "-c", ENTER, "sh", str(self.root), cgroups]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            with subprocess.Popen(["sh", "-c", ENTER_CGROUPS, cgroups, *enter], env=environment(), **pipes) as parent:
                try:
                    assert parent.stdin is not None and parent.stdout is not None
                    assert parent.stdout.readline() == "entered\n"
                    for each in folders:
                        (find_outside_cgroup(each) / "cgroup.procs").write_text(str(parent.pid))
                    parent.stdin.write("\n")
                    parent.stdin.close()
                    yield Booted(first_process(folders))
                finally:
                    parent.kill()


class Booted:
    """The running container. `pid` is the PID of its systemd."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def run(self, command: str, user: str, output: int | None = None) -> int:
        """Run a shell command in a login session of `user`; `output` receives its stdout and stderr."""
        kept = [f"--setenv={name}={value}" for name, value in environment().items() if name != "HOME"]
        start = ["systemd-run", "--quiet", "--wait", "--pipe", "--collect", "-p", "PAMName=login", "-p", f"User={user}"]
        argv = ["nsenter", "-t", str(self.pid), "--all", *start, *kept, "bash", "-c", command]
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        return subprocess.run(argv, check=False, env=environment(), **streams).returncode


def find_outside_cgroup(folder: Path) -> Path:
    """Return the cgroup for a process that leaves this one.

    With v1 it is the parent. With v2 it is this process's own cgroup, because a parent that enables controllers for its
    children may hold no process.
    """
    if not (folder / "cgroup.controllers").exists():
        return folder.parent
    own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    top = [each for each in folder.parents if (each / "cgroup.controllers").exists()][-1]
    return top / own.removeprefix("0::/")


def pass_controllers_on(folders: list[Path]) -> None:
    """Give the container's folder of cgroup v2 every controller that the machine has; v1 has a folder for each."""
    for parent in {each.parent for each in folders if (each / "cgroup.controllers").exists()}:
        for name in (parent / "cgroup.controllers").read_text().split():
            with contextlib.suppress(OSError):
                (parent / "cgroup.subtree_control").write_text(f"+{name}")


def first_process(folders: list[Path]) -> int:
    """Return the PID of the container's systemd outside the container, once it has booted."""
    deadline = time.monotonic() + BOOT_TIMEOUT_S
    while time.monotonic() < deadline:
        for each in folders:
            with contextlib.suppress(OSError):
                for pid in (each / "init.scope/cgroup.procs").read_text().split():
                    if subprocess.run(is_running(pid), capture_output=True, check=False).returncode == 0:
                        return int(pid)
        time.sleep(0.2)
    sys.exit("systemd did not boot in the container")


def is_running(pid: str) -> list[str]:
    return ["nsenter", "-t", pid, "--all", "systemctl", "is-system-running", "--wait"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "fresh", "push", "run"))
    parser.add_argument("words", nargs=argparse.REMAINDER, help="USER COMMAND...")
    asked = parser.parse_args()
    container = Container()
    new = asked.what == "fresh" or not container.root.exists()
    container.build(fresh=asked.what == "fresh")
    if new or asked.what == "push":
        container.push()
    if new and (code := container.set_up()):
        sys.exit(code)
    if asked.what == "run":
        user, *words = asked.words
        with container.booted() as booted:
            sys.exit(booted.run(f"cd {CLONE_THERE} && {shlex.join(words)}", user))


if __name__ == "__main__":
    main()
