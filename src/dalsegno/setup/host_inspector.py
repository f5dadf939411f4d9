"""Print facts about the machine it runs on, as one line of JSON. It changes nothing.

This file is sent to a host and runs there alone, with Python 3.9 or later and no other package. The arguments are names
of packages to look for. A part that fails is listed in `problems`; the other parts are still reported.
`setup/inspect.py` sends it and reads its answer.
"""

from __future__ import annotations

import glob
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 20
MOST = 5000  # the largest number of entries in one list
DAEMONS = ("slurmctld", "slurmd", "slurmdbd", "slurmrestd", "munged", "mariadbd", "mysqld", "nfsd", "sshd")
SLURM_CONF = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/usr/local/etc/slurm.conf")
MUNGE_KEY = "/etc/munge/munge.key"
RECORD = "/var/lib/dalsegno/setup"
ACCOUNTS = "/var/lib/dalsegno/accounts.json"  # the accounts that Dal Segno has created
# Calls on these file systems hang if their server is unreachable.
REMOTE = ("nfs", "lustre", "fuse", "cifs", "smb", "ceph", "gpfs", "beegfs", "9p", "afs", "weka")
# Files of which the set-up may write a changed copy.
FILES = ("/etc/nsswitch.conf", "/etc/pam.d/sshd", "/etc/pam.d/common-session", "/etc/pam.d/password-auth")
DISKS = ("ext", "xfs", "btrfs", "zfs", "vfat", "overlay", "tmpfs", "f2fs", "bcachefs")


def read(path: str, most: int = 1 << 20) -> str:
    with open(path, errors="replace") as file:
        return file.read(most)


def try_read(path: str) -> str:
    try:
        return read(path)
    except OSError:
        return ""


def ask(*argv: str) -> str:
    """Return what a program prints; nothing if it is missing, fails or hangs."""
    program = shutil.which(argv[0], path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")
    if program is None:
        return ""
    env = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            [program, *argv[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_S, env=env, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


def system() -> dict[str, Any]:
    fields = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', try_read("/etc/os-release"), re.MULTILINE))
    return {
        "os_id": fields.get("ID", ""),
        "os_version": fields.get("VERSION_ID", ""),
        "os_like": fields.get("ID_LIKE", "").split(),
        "os_name": fields.get("PRETTY_NAME", ""),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": list(sys.version_info[:3]),
        "python_path": sys.executable,
        "hostname": socket.gethostname(),
        "machine_id": try_read("/etc/machine-id").strip(),
        "boot_id": try_read("/proc/sys/kernel/random/boot_id").strip(),
        "uid": os.geteuid(),
        "systemd": os.path.isdir("/run/systemd/system"),
        "selinux": try_read("/sys/fs/selinux/enforce").strip() == "1",
        "package_manager": next((each for each in ("apt-get", "dnf", "yum", "zypper") if shutil.which(each)), ""),
    }


def processors() -> dict[str, Any]:
    packages, cores, threads = set(), set(), 0
    for folder in glob.glob("/sys/devices/system/cpu/cpu[0-9]*/topology"):
        package, core = (try_read(f"{folder}/{name}").strip() for name in ("physical_package_id", "core_id"))
        packages.add(package)
        cores.add((package, core))
        threads += 1
    memory = re.search(r"^MemTotal:\s+(\d+) kB", try_read("/proc/meminfo"), re.MULTILINE)
    return {
        "cpus": os.cpu_count() or threads,
        "sockets": len(packages),
        "cores": len(cores),
        "memory_mib": int(memory.group(1)) // 1024 if memory else 0,
    }


def gpus() -> dict[str, Any]:
    query = ask("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
    found, driver = [], try_read("/sys/module/nvidia/version").strip()
    for line in query.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3:
            found.append({"name": fields[0], "memory_mib": int(fields[1]) if fields[1].isdigit() else 0})
            driver = fields[2]
    if not found:
        for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
            model = re.search(r"^Model:\s*(.+)$", try_read(path), re.MULTILINE)
            found.append({"name": model.group(1).strip() if model else "", "memory_mib": 0})
    return {"gpus": found, "driver": driver}


def disks() -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}  # by mount point, because the last mount on a folder hides the others
    for line in try_read("/proc/self/mounts").splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        mount, kind = re.sub(r"\\(\d{3})", lambda code: chr(int(code.group(1), 8)), fields[1]), fields[2]
        if kind.startswith(REMOTE):
            found[mount] = {"mount": mount, "type": kind, "source": fields[0]}
        elif kind.startswith(DISKS) and "ro" not in fields[3].split(","):
            status = os.statvfs(mount)
            size, free = (count * status.f_frsize >> 20 for count in (status.f_blocks, status.f_bavail))
            found[mount] = {"mount": mount, "type": kind, "source": fields[0], "size_mib": size, "free_mib": free}
    return {"disks": list(found.values())[:MOST]}


def fabric() -> dict[str, Any]:
    found = []
    for folder in sorted(glob.glob("/sys/class/infiniband/*")):
        port = (sorted(glob.glob(f"{folder}/ports/*")) or [""])[0]
        driver = os.path.basename(os.path.realpath(f"{folder}/device/driver"))
        found.append({
            "device": os.path.basename(folder), "driver": driver, "layer": try_read(f"{port}/link_layer").strip(),
            "port_state": try_read(f"{port}/state").strip(), "rate": try_read(f"{port}/rate").strip(),
        })  # fmt: skip
    return {"fabric": found}


def packages() -> dict[str, Any]:
    found: dict[str, str] = {}
    names = sys.argv[1:]
    if not names:
        return {"packages": found}
    if shutil.which("dpkg-query"):
        for line in ask("dpkg-query", "-W", "-f", "${Package}\t${Version}\t${db:Status-Status}\n", *names).splitlines():
            fields = line.split("\t")
            if len(fields) == 3 and fields[2] == "installed":
                found[fields[0]] = fields[1]
    else:
        for line in ask("rpm", "-q", "--qf", "%{NAME}\t%{VERSION}-%{RELEASE}\n", *names).splitlines():
            fields = line.split("\t")
            if len(fields) == 2:
                found[fields[0]] = fields[1]
    return {"packages": found}


def ports() -> dict[str, Any]:
    owners = {}
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            inode = os.readlink(path)
        except OSError:
            continue
        if inode.startswith("socket:["):
            owners[inode[8:-1]] = path.split("/")[2]
    found = {}
    for name in ("tcp", "tcp6"):
        for line in try_read(f"/proc/net/{name}").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == "0A":
                program = try_read(f"/proc/{owners.get(fields[9], '-')}/comm").strip()
                found[int(fields[1].rpartition(":")[2], 16)] = program
    return {"listening": [{"port": port, "program": found[port]} for port in sorted(found)][:MOST]}


def cgroups() -> dict[str, Any]:
    kinds = {
        fields[2]: fields[1] for fields in map(str.split, try_read("/proc/self/mounts").splitlines()) if len(fields) > 3
    }
    version = 1 if "cgroup" in kinds else 2 if "cgroup2" in kinds else 0
    return {"cgroup_version": version}


def slurm() -> dict[str, Any]:
    conf = next((path for path in SLURM_CONF if os.path.exists(path)), "")
    own, running = os.readlink("/proc/self/ns/pid"), set()
    for path in glob.glob("/proc/[0-9]*/comm"):
        name = try_read(path).strip()
        if name in DAEMONS:
            try:
                # A daemon in a container has another PID namespace and does not count.
                same = os.readlink(os.path.join(os.path.dirname(path), "ns/pid")) == own
            except OSError:
                same = True
            if same:
                running.add(name)
    return {
        "slurm_conf": conf,
        "slurm_conf_head": (try_read(conf).splitlines() or [""])[0] if conf else "",
        "munge_key": os.path.exists(MUNGE_KEY),
        "record": os.path.isdir(RECORD),
        "daemons": sorted(running),
    }


def accounts() -> dict[str, Any]:
    made = json.loads(try_read(ACCOUNTS) or "{}")
    users: list[dict[str, Any]] = []
    groups: list[dict[str, Any]] = []
    for fields in (line.split(":") for line in read("/etc/passwd").splitlines()):
        if len(fields) == 7 and fields[2].isdigit() and fields[3].isdigit():
            ours = fields[0] in made.get("users", {})
            users.append({"name": fields[0], "uid": int(fields[2]), "gid": int(fields[3]), "ours": ours})
    local = {user["name"] for user in users}
    for name, uid in made.get("users", {}).items():
        if type(uid) is int and name not in local:  # the account is in a directory, which may be gone
            users.append({"name": name, "uid": uid, "gid": uid, "ours": True})
    for fields in (line.split(":") for line in read("/etc/group").splitlines()):
        if len(fields) == 4 and fields[2].isdigit():
            ours = fields[0] in made.get("groups", {})
            members = [name for name in fields[3].split(",") if name]
            groups.append({"name": fields[0], "gid": int(fields[2]), "members": members, "ours": ours})
    return {"users": users[:MOST], "groups": groups[:MOST]}


def host_keys() -> dict[str, Any]:
    found = [try_read(f"/etc/ssh/ssh_host_{kind}_key.pub").split()[:2] for kind in ("ed25519", "ecdsa")]
    return {"host_keys": [" ".join(key) for key in found if len(key) == 2]}


def files() -> dict[str, Any]:
    found = {path: try_read(path) for path in FILES}
    return {"files": {path: text for path, text in found.items() if text}}


def addresses() -> dict[str, Any]:
    links = json.loads(ask("ip", "-j", "address") or "[]")
    found = [
        each.get("local", "") for link in links for each in link.get("addr_info", []) if each.get("scope") != "host"
    ]
    return {"addresses": [each for each in found if not each.startswith("fe80:")]}


PARTS: list[Callable[[], dict[str, Any]]] = [
    system, processors, gpus, disks, fabric, packages, ports, cgroups, slurm, accounts, addresses,
    host_keys, files,
]  # fmt: skip


def main() -> None:
    answer: dict[str, Any] = {"dalsegno": "inspection", "problems": []}
    for part in PARTS:
        try:
            answer.update(part())
        except Exception as error:  # one broken part must not hide the others
            answer["problems"].append(f"{part.__name__}: {error}"[:300])
    answer["time"] = time.time()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
