"""The program behind `tests/ssh/hosts.py`: a switch and the virtual hosts that are connected to it.

It reads a plan (JSON) from its first argument, prints a line per host, and runs until its standard input closes. All
hosts end with it, because the kernel kills them when their parent dies. Nothing stays behind then: mounts, links and
processes are in namespaces of their own. Only empty cgroup folders are left for `hosts.py` to remove.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from dalsegno.system.guest import init
from dalsegno.system.guest.kernel import (
    MNT_DETACH,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    give_address,
    link_up,
    mount,
    name_process,
    quiet_ipv6,
    set_hostname,
    unshare_all,
    wait_for_link,
)
from dalsegno.system.hanging_calls import die_with_parent

BRIDGE = "switch"
INTERFACE = "eth0"
# Folders that the hosts share with the machine, read-only below their own writable layer. All others start empty.
KEPT = {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "var"}
EMPTY = ("etc/slurm", "etc/ssh/sshd_config.d", "var/tmp", "var/lib/dalsegno", "var/lib/containers", "var/lib/slurm")
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0),
           "fuse": (10, 229)}  # fmt: skip
SSHD = "/usr/sbin/sshd"
SSHD_CONFIG = """\
Port {port}
HostKey /etc/ssh/ssh_host_ed25519_key
AuthorizedKeysFile .ssh/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM yes
UseDNS no
PrintMotd no
MaxStartups 100
AcceptEnv LANG LC_*
Subsystem sftp /usr/lib/openssh/sftp-server
"""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    plan = json.loads(Path(sys.argv[1]).read_text())
    die_with_parent(os.getppid())
    machine = os.open("/proc/self/ns/net", os.O_RDONLY)
    _check(_libc.unshare(0x40000000), "unshare network")
    _ip(f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up")
    pids = {}
    for host in plan["hosts"]:
        pids[host["name"]] = _boot(plan, host)
    _connect(plan, pids, machine)
    for host in plan["hosts"]:
        print(host["name"], pids[host["name"]], flush=True)
    sys.stdin.read()
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    return 0


def _connect(plan: dict[str, Any], pids: dict[str, int], machine: int) -> None:
    lines = []
    for number, pid in enumerate(pids.values()):
        lines += [
            f"link add port{number} type veth peer name {INTERFACE} netns {pid}",
            f"link set port{number} master {BRIDGE}",
            f"link set port{number} up",
        ]
    cable = plan["cable"]
    lines += [f"link add uplink type veth peer name {cable} netns {os.getppid()}",
              f"link set uplink master {BRIDGE}", "link set uplink up"]  # fmt: skip
    _ip(*lines)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    _check(_libc.setns(machine, 0x40000000), "setns")
    _ip(f"addr add {plan['operator']}/{plan['bits']} dev {cable}", f"link set {cable} up")
    _check(_libc.setns(own, 0x40000000), "setns")
    os.close(own)
    os.close(machine)


def _ip(*lines: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines) + "\n", text=True, check=True)


def _boot(plan: dict[str, Any], host: dict[str, Any]) -> int:
    """Start one host, and return the PID of its first process once its files are in place."""
    ready, result = os.pipe()
    parent = os.getpid()
    if os.fork() == 0:
        try:
            os.close(ready)
            die_with_parent(parent)
            os.setsid()
            unshare_all()
            child = os.fork()
            if child == 0:
                _become_host(plan, host, result)
            os.close(result)
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            os.waitpid(child, 0)
        finally:
            os._exit(1)
    os.close(result)
    with os.fdopen(ready) as pipe:
        answer = pipe.read()
    if not answer.isdigit():
        raise SystemExit(f"{host['name']}: {answer or 'died'}")
    return int(answer)


def _become_host(plan: dict[str, Any], host: dict[str, Any], result: int) -> NoReturn:
    try:
        _libc.prctl(1, signal.SIGKILL, 0, 0, 0)
        pid = int(os.readlink("/proc/self"))
        name_process(f"host:{host['name']}")
        log = os.open(host["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(source, descriptor)
        mount("none", "/", "", MS_REC | MS_PRIVATE)
        if plan["cgroups"]:
            init._join_cgroups(
                {"cgroups": {plan["cgroups"]: host["cgroup"]}, "unified": plan["unified"], "isolate": True, "unit": ""}
            )
        root = _make_root(host)
        _write_files(root, plan, host)
        _enter_root(root, plan["shared"])
        set_hostname(host["name"])
        quiet_ipv6()
        link_up("lo")
        os.write(result, str(pid).encode())
        os.close(result)
        wait_for_link(INTERFACE)
        give_address(INTERFACE, f"{host['address']}/{plan['bits']}")
        _live()
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(result, f"{error!r}".encode())
    os._exit(1)


def _make_root(host: dict[str, Any]) -> str:
    """Mount a tree that shows the machine's files below a writable layer in memory, and return its path."""
    base = host["folder"]
    mount("tmpfs", base, "tmpfs", 0, f"size={host['disk_mib']}m,mode=755")
    upper, work, root = (os.path.join(base, each) for each in ("upper", "work", "root"))
    for folder in (upper, work, root):
        os.mkdir(folder)
    for name in os.listdir("/"):
        if name not in KEPT and os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}"):
            _empty(upper, name)
    for name in EMPTY:
        if os.path.isdir(f"/{name}"):
            _empty(upper, name)
    for name in ("root", "tmp", "run", "home", "opt", "srv", "dev", "proc", "sys", "mnt"):
        os.makedirs(os.path.join(upper, name), exist_ok=True)
    os.chmod(os.path.join(upper, "root"), 0o700)
    for name in ("tmp", "var/tmp"):
        os.chmod(os.path.join(upper, name), 0o1777)
    _keep_folders_only(upper, "var/log")
    mount("overlay", root, "overlay", 0, f"lowerdir=/,upperdir={upper},workdir={work}")
    return root


def _empty(upper: str, name: str) -> None:
    """Make an empty folder that hides the machine's, with the same owner and mode."""
    path = os.path.join(upper, name)
    _copy_parents(upper, name)
    os.mkdir(path)
    _copy_status(f"/{name}", path)
    os.setxattr(path, "trusted.overlay.opaque", b"y")


def _keep_folders_only(upper: str, name: str) -> None:
    _empty(upper, name)
    for entry in os.scandir(f"/{name}"):
        if entry.is_dir(follow_symlinks=False):
            os.mkdir(os.path.join(upper, name, entry.name))
            _copy_status(entry.path, os.path.join(upper, name, entry.name))


def _copy_parents(upper: str, name: str) -> None:
    for parent in reversed(Path(name).parents):
        path = os.path.join(upper, parent)
        if not os.path.isdir(path):
            os.mkdir(path)
            _copy_status(f"/{parent}", path)


def _copy_status(source: str, target: str) -> None:
    found = os.stat(source)
    os.chown(target, found.st_uid, found.st_gid)
    os.chmod(target, found.st_mode & 0o7777)


def _write_files(root: str, plan: dict[str, Any], host: dict[str, Any]) -> None:
    """Write the files that distinguish this host from the others: name, keys, accounts."""

    def write(path: str, text: str, mode: int = 0o644, owner: tuple[int, int] = (0, 0)) -> None:
        place = Path(root, path.lstrip("/"))
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.write_text(text)
        place.chmod(mode)
        os.chown(place, *owner)

    write("/etc/hostname", f"{host['name']}\n")
    write("/etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {host['name']}\n")
    write("/etc/machine-id", os.urandom(16).hex() + "\n")
    for old in Path(root, "etc/ssh").glob("ssh_host_*"):
        old.unlink()
    write("/etc/ssh/ssh_host_ed25519_key", host["private_key"], 0o600)
    write("/etc/ssh/ssh_host_ed25519_key.pub", host["public_key"])
    write("/etc/ssh/sshd_config", SSHD_CONFIG.format(port=plan["port"]))
    if (key := Path(root, "etc/munge/munge.key")).exists():  # a separate key, as the package creates it
        found = key.stat()
        key.write_bytes(os.urandom(128))
        os.chown(key, found.st_uid, found.st_gid)
    accounts = {name: Path(root, "etc", name).read_text() for name in ("passwd", "shadow", "group")}
    for user in plan["users"]:
        name, uid = user["name"], user["uid"]
        accounts["passwd"] += f"{name}:x:{uid}:{uid}::/home/{name}:/bin/bash\n"
        accounts["shadow"] += f"{name}:{user['password']}:19000:0:99999:7:::\n"
        accounts["group"] += f"{name}:x:{uid}:\n"
        home = Path(root, "home", name)
        home.mkdir(mode=0o700)
        write(f"/home/{name}/.ssh/authorized_keys", plan["authorized_key"], 0o600, (uid, uid))
        for folder in (home, home / ".ssh"):
            folder.chmod(0o700)
            os.chown(folder, uid, uid)
        if user["sudoers"]:
            write(f"/etc/sudoers.d/{name}", f"{name} {user['sudoers']}\n", 0o440)
    write("/etc/passwd", accounts["passwd"])
    write("/etc/group", accounts["group"])
    write("/etc/shadow", accounts["shadow"], 0o640, (0, 42))
    write("/root/.ssh/authorized_keys", plan["authorized_key"], 0o600)
    Path(root, "root/.ssh").chmod(0o700)
    for folder in ("run/sshd", "run/lock"):
        Path(root, folder).mkdir(parents=True, exist_ok=True)


def _enter_root(root: str, shared: str) -> None:
    if shared:  # like a folder of a file server that an administrator has mounted
        os.mkdir(f"{root}/shared")
        mount(shared, f"{root}/shared", "", MS_BIND)
    mount("tmpfs", f"{root}/dev", "tmpfs", MS_NOSUID, "mode=755")
    for name, (major, minor) in DEVICES.items():
        os.mknod(f"{root}/dev/{name}", 0o20666, os.makedev(major, minor))
        os.chmod(f"{root}/dev/{name}", 0o666)
    for name in ("shm", "pts"):
        os.mkdir(f"{root}/dev/{name}")
    for name, target in (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"),
                         ("stderr", "fd/2")):  # fmt: skip
        os.symlink(target, f"{root}/dev/{name}")
    mount("tmpfs", f"{root}/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    mount("devpts", f"{root}/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5")
    mount("tmpfs", f"{root}/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    for folder in ("sshd", "lock"):
        os.mkdir(f"{root}/run/{folder}")
    mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("sysfs", f"{root}/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if os.path.isdir("/sys/fs/cgroup"):
        mount("/sys/fs/cgroup", f"{root}/sys/fs/cgroup", "", MS_BIND | MS_REC)
    os.chdir(root)
    _check(_libc.syscall(155, b".", b"."), "pivot_root")  # the machine's root is now below this process's own root
    _check(_libc.umount2(b".", MNT_DETACH), "unmount the machine's root")
    os.chdir("/")


def _live() -> NoReturn:
    """Start sshd, and adopt all orphans, until the kernel kills this host."""
    os.posix_spawn(SSHD, [SSHD, "-D", "-e"], {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
                   setsid=True)  # fmt: skip
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            signal.sigtimedwait({signal.SIGCHLD}, 1)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    raise SystemExit(main())
