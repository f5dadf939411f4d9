"""Print facts about the machine that this program runs on, as one line of JSON. It changes nothing.

`setup/inspect.py` sends this file to a host and parses the output. The file runs there alone, with Python 3.9 or later
and no other package. The arguments are names of packages to look for. If one part fails, it is listed in `problems`,
and the other parts are still reported.
"""

from __future__ import annotations

import glob
import json
import os
import platform
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 20
REPOSITORIES_S = 60  # dnf may have to fetch the lists of packages first
OLDEST_PYTHON = (3, 10)  # the oldest Python that our daemons run with; this program needs 3.9
MOST = 5000  # the largest number of entries in one list
DAEMONS = ("slurmctld", "slurmd", "slurmdbd", "slurmrestd", "munged", "mariadbd", "mysqld", "nfsd", "sshd")
SLURM_CONF = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/usr/local/etc/slurm.conf")
PLUGSTACK = "/etc/slurm/plugstack.conf"
PYXIS = "spank_pyxis.so"
INCLUDES = 4  # how deep plugstack.conf files may include one another
MUNGE_KEY = "/etc/munge/munge.key"
RECORD = "/var/lib/dalsegno/setup"
ACCOUNTS = "/var/lib/dalsegno/accounts.json"  # the accounts that Dal Segno created
# A call on one of these file systems can hang if its server is unreachable.
REMOTE = ("nfs", "lustre", "fuse", "cifs", "smb", "ceph", "gpfs", "beegfs", "9p", "afs", "weka")
# The setup may replace these files with a changed copy, so it needs their content.
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


def ask(*argv: str, timeout_s: float = TIMEOUT_S) -> str:
    """Return the output of a program; "" if the program is missing, fails or hangs."""
    program = shutil.which(argv[0], path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")
    if program is None:
        return ""
    env = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            [program, *argv[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=timeout_s, env=env, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


def parse_os_release(text: str) -> dict[str, Any]:
    fields = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', text, re.MULTILINE))
    return {
        "os_id": fields.get("ID", ""),
        "os_version": fields.get("VERSION_ID", ""),
        "os_like": fields.get("ID_LIKE", "").split(),
        "os_name": fields.get("PRETTY_NAME", ""),
    }


def find_python() -> dict[str, Any]:
    """Return the Python for our daemons. Some systems have a newer Python beside `python3`, such as 3.12 on RHEL 9."""
    found, path = list(sys.version_info[:3]), sys.executable
    for minor in range(19, OLDEST_PYTHON[1] - 1, -1) if sys.version_info < OLDEST_PYTHON else ():
        if later := shutil.which(f"python3.{minor}"):
            return {"python": [3, minor, 0], "python_path": later}
    return {"python": found, "python_path": path}


def system() -> dict[str, Any]:
    return {
        **parse_os_release(try_read("/etc/os-release")),
        **find_python(),
        "kernel": platform.release(),
        "machine": platform.machine(),
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
    named = [name for name in names if name.startswith("/")]
    names = [name.partition("=")[0] for name in names if name not in named]
    untrusted = [path for path in named if not only_root_changes(path)]
    # The resolved path is the one that was checked. It has no links that somebody could change.
    paths = {path: os.path.realpath(path) for path in named if path not in untrusted and os.path.exists(path)}
    if shutil.which("dpkg-query"):
        for line in ask("dpkg-query", "-W", "-f", "${Package}\t${Version}\t${db:Status-Status}\n", *names).splitlines():
            fields = line.split("\t")
            if len(fields) == 3 and fields[2] == "installed":
                found[fields[0]] = fields[1]
        versions = {path: ask("dpkg-deb", "-f", real, "Version").strip() for path, real in paths.items()}
        available = {path: version for path, version in versions.items() if version}
        return {"packages": found, "available": available, "untrusted": untrusted}
    found = pairs(ask("rpm", "-q", "--qf", "%{NAME}\t%{VERSION}-%{RELEASE}\n", *names))
    missing = [name for name in names if name not in found]
    query = ["dnf", "-q", "repoquery", "--latest-limit=1", "--qf", "%{name}\t%{version}-%{release}\n", *missing]
    available = pairs(ask(*query, timeout_s=REPOSITORIES_S)) if missing else {}
    for path, real in paths.items():
        if version := ask("rpm", "-qp", "--qf", "%{VERSION}-%{RELEASE}", real):
            available[path] = version
    return {"packages": found, "available": available, "untrusted": untrusted}


def only_root_changes(path: str) -> bool:
    """Return whether only root can write or replace a package file. A missing file counts as trusted.

    Root must not let dpkg or rpm parse a file that other users can change, because these programs are not made for
    hostile files.
    """
    for start in (path, os.path.realpath(path)):
        place = start
        while True:
            try:
                about = os.lstat(place)
            except OSError:
                about = None
            if about and (about.st_uid != 0 or (about.st_mode & 0o022 and not stat.S_ISLNK(about.st_mode))):
                return False
            if place == "/":
                break
            place = os.path.dirname(place)
    return True


def pairs(text: str) -> dict[str, str]:
    rows = [line.split("\t") for line in text.splitlines()]
    return {row[0]: row[1] for row in rows if len(row) == 2}


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


def containers() -> dict[str, Any]:
    """Report Pyxis only if Slurm would load it: an installed file that no plugstack.conf names has no effect."""
    loaded = [words[1] for words in plugin_lines(PLUGSTACK) if os.path.basename(words[1]) == PYXIS]
    return {"pyxis": loaded[0] if loaded else "", "enroot": shutil.which("enroot") is not None}


def plugin_lines(path: str, depth: int = 0) -> list[list[str]]:
    """Return the words of all lines that load a plugin, in plugstack.conf and in the files that it includes."""
    found = []
    for words in (line.partition("#")[0].split() for line in try_read(path).splitlines()):
        if words[:1] == ["include"] and len(words) > 1 and depth < INCLUDES:
            for each in sorted(glob.glob(os.path.join(os.path.dirname(path), words[1])))[:MOST]:
                found += plugin_lines(each, depth + 1)
        elif words[:1] in (["required"], ["optional"]) and len(words) > 1:
            found.append(words)
    return found


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
        # The account is in a directory. Report it even if the directory was removed, so that its uid stays reserved.
        if type(uid) is int and name not in local:
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
    system, processors, gpus, disks, fabric, packages, ports, cgroups, slurm, containers, accounts,
    addresses, host_keys, files,
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
