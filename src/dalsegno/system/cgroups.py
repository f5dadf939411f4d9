"""Control groups: find this machine's hierarchies and a cluster's folders in them, and remove these folders.

The hierarchies are found in the list of mounts. Virtual hosts use the freezer of cgroup v1 if it is mounted, otherwise
cgroup v2. If systemd runs, it owns the tree, and a cluster is in a scope that systemd creates with `Delegate=yes`.
Neither a daemon-reload nor the end of a login session affects that scope.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.system.processes import Runner

MOUNTS = Path("/proc/self/mounts")
SYSTEMD_RUNS = Path("/run/systemd/system")  # exists if systemd runs, see sd_booted(3)
REMOVE_TIMEOUT_S = 2.0  # how long to wait for a folder that is busy after its last process has ended


@dataclass(frozen=True)
class CgroupTree:
    """The hierarchies of this machine.

    `root` is the mount point of the hierarchy that holds the folders of virtual hosts: the freezer of cgroup v1, or
    cgroup v2. It is "" if neither is writable.
    """

    version: int = 0
    root: str = ""
    systemd: tuple[str, ...] = ()  # mount points of the hierarchies that systemd manages; empty without systemd
    controllers: frozenset[str] = frozenset()  # v2 controllers that are available below the root

    def place(self, cluster_id: str) -> CgroupPlace:
        """Return the cgroup folders of a cluster."""
        unit = f"dalsegno-{cluster_id}.scope" if self.systemd else ""
        units = tuple(f"{root}/system.slice/{unit}" for root in self.systemd)
        if self.version == 2:
            return CgroupPlace(units[0] if units else f"{self.root}/dalsegno-{cluster_id}", unit, units)
        return CgroupPlace(f"{self.root}/dalsegno-{cluster_id}" if self.root else "", unit, units)


@dataclass(frozen=True)
class CgroupPlace:
    """The cgroup folders of a cluster.

    `base` has a folder for each host. `unit` is the cluster's systemd scope, whose folders are `unit_folders`.
    """

    base: str
    unit: str = ""
    unit_folders: tuple[str, ...] = ()


def find_cgroups(mounts: str, *, systemd: bool) -> CgroupTree:
    """Find the hierarchies in the text of /proc/self/mounts."""
    found = [(target, kind, options.split(",")) for _, target, kind, options in _mounts(mounts)]
    freezer = next((at for at, kind, options in found if kind == "cgroup" and "freezer" in options), "")
    named = [at for at, kind, options in found if kind == "cgroup" and "name=systemd" in options]
    unified = [(at, options) for at, kind, options in found if kind == "cgroup2"]
    if freezer or named:
        homes = (*named, *(at for at, _ in unified)) if systemd else ()
        return CgroupTree(1 if freezer else 0, freezer, homes)
    if not unified:
        return CgroupTree()
    at, options = unified[0]
    homes = (at,) if systemd else ()
    return CgroupTree(2, at, homes) if "rw" in options else CgroupTree(0, "", homes)


def _mounts(text: str) -> Iterator[tuple[str, str, str, str]]:
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 4:
            yield fields[0], fields[1], fields[2], fields[3]


def read_cgroups() -> CgroupTree:
    """Return the hierarchies of this machine."""
    tree = find_cgroups(MOUNTS.read_text(errors="replace"), systemd=SYSTEMD_RUNS.is_dir())
    if tree.version != 2:
        return tree
    return CgroupTree(tree.version, tree.root, tree.systemd, controllers_below(Path(tree.root)))


def controllers_below(root: Path) -> frozenset[str]:
    """Return the controllers that are available below the root of cgroup v2.

    In a container, the root is a folder of the host's tree. While processes are in that folder, no more controllers can
    be enabled for its children, and every Slurm step that needs another controller fails.
    """
    offered = _words(root / "cgroup.controllers")
    # Without the file cgroup.type, this is the machine's root, which can have processes and still enable controllers.
    if not (root / "cgroup.type").exists() or not _words(root / "cgroup.procs"):
        return offered
    return offered & _words(root / "cgroup.subtree_control")


def _words(path: Path) -> frozenset[str]:
    try:
        return frozenset(path.read_text().split())
    except OSError:
        return frozenset()


def scope_command(unit: str, description: str) -> list[str]:
    """Return the prefix that starts a command in a new scope. The scope ends with its last process."""
    properties = ("Delegate=yes", "TasksMax=infinity", "CollectMode=inactive-or-failed", f"Description={description}")
    words = [word for each in properties for word in ("-p", each)]
    return ["systemd-run", "--quiet", "--scope", "--slice=system.slice", f"--unit={unit}", *words, "--"]


LINGER = Path("/var/lib/systemd/linger")  # contains a file for each user whose systemd instance outlives the sessions
KILLS = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager", "KillUserProcesses")


def user_scope_command(user: str, linger: Path = LINGER) -> list[str]:
    """Return the prefix that starts a plain user's command outside the login session.

    The prefix is empty if the user has no systemd instance that outlives the session.
    """
    if not (SYSTEMD_RUNS.is_dir() and (linger / user).exists()):
        return []
    return ["systemd-run", "--user", "--quiet", "--scope", "--collect", "--"]


def ends_with_session(runner: Runner, user: str) -> bool:
    """Return whether logind kills a plain user's processes when the session ends. Return False if they can be started
    outside the session."""
    if not SYSTEMD_RUNS.is_dir() or user_scope_command(user) or shutil.which("busctl") is None:
        return False
    return runner.run(["busctl", "get-property", *KILLS], timeout_s=30).stdout.strip() == "b true"


def cluster_folders(cluster_id: str, mounted: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Return all cgroup folders of a cluster, in cgroup v1, in cgroup v2 and in scopes of systemd."""
    name = f"dalsegno-{cluster_id}"
    patterns = (name, f"*/{name}", f"system.slice/{name}.scope", f"*/system.slice/{name}.scope")
    return [path for pattern in patterns for path in mounted.glob(pattern)]


def remove_cgroup(root: Path) -> None:
    """Remove a folder and all folders below it, deepest first.

    Wait for busy folders, for at most REMOVE_TIMEOUT_S in total.
    """
    until = time.monotonic() + REMOVE_TIMEOUT_S
    for path in _deepest_first([root]):
        while not _removed(path) and time.monotonic() < until:
            time.sleep(0.01)


def _deepest_first(roots: Iterable[Path]) -> Sequence[Path]:
    found: list[Path] = []
    for root in roots:
        with contextlib.suppress(OSError):  # systemd may have removed the empty folder
            found += _deepest_first(path for path in root.iterdir() if path.is_dir())
        found.append(root)
    return found


def _removed(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
