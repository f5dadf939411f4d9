"""Control groups: which hierarchies this machine has, where a cluster's own folders go, and how they are removed.

Which machine it is, is read from the mounts alone. Virtual hosts use cgroup v1's freezer where it is mounted (hybrid
machines included), else cgroup v2. Where systemd runs it owns the tree: a cluster then lives in a scope that systemd
made for it with `Delegate=yes`, so that neither a daemon-reload nor the end of a login session touches it.
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
SYSTEMD_RUNS = Path("/run/systemd/system")  # sd_booted(3)
REMOVE_S = 2.0  # a folder is free a moment after its last process has ended


@dataclass(frozen=True)
class CgroupTree:
    """The hierarchies of this machine. `root` is where virtual hosts get folders of their own: the freezer's of
    cgroup v1, or the only one of cgroup v2; "" where neither can be written."""

    version: int = 0
    root: str = ""
    systemd: tuple[str, ...] = ()  # the hierarchies in which systemd keeps its units; none without systemd
    controllers: frozenset[str] = frozenset()  # of v2, those that folders below the root can have

    def place(self, cluster_id: str) -> CgroupPlace:
        """Return where a cluster's folders are."""
        unit = f"dalsegno-{cluster_id}.scope" if self.systemd else ""
        units = tuple(f"{root}/system.slice/{unit}" for root in self.systemd)
        if self.version == 2:
            return CgroupPlace(units[0] if units else f"{self.root}/dalsegno-{cluster_id}", unit, units)
        return CgroupPlace(f"{self.root}/dalsegno-{cluster_id}" if self.root else "", unit, units)


@dataclass(frozen=True)
class CgroupPlace:
    """A cluster's place: `base` holds a folder for each host, `unit` is its scope, at `unit_folders`."""

    base: str
    unit: str = ""
    unit_folders: tuple[str, ...] = ()


def find_cgroups(mounts: str, *, systemd: bool) -> CgroupTree:
    """Tell what kind of machine this is from the text of /proc/self/mounts."""
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


def look_at_cgroups() -> CgroupTree:
    """Return the hierarchies of the machine we stand on."""
    tree = find_cgroups(MOUNTS.read_text(errors="replace"), systemd=SYSTEMD_RUNS.is_dir())
    if tree.version != 2:
        return tree
    return CgroupTree(tree.version, tree.root, tree.systemd, controllers_below(Path(tree.root)))


def controllers_below(root: Path) -> frozenset[str]:
    """Return the controllers that folders below the root of cgroup v2 can have.

    In a container the root is a folder of the machine's. While a process is in it, the kernel lets it pass on no more
    controllers than it does already, and Slurm fails every step that it shall hold by another one.
    """
    offered = _words(root / "cgroup.controllers")
    if not (root / "cgroup.type").exists() or not _words(root / "cgroup.procs"):  # the machine's own has no type
        return offered
    return offered & _words(root / "cgroup.subtree_control")


def _words(path: Path) -> frozenset[str]:
    try:
        return frozenset(path.read_text().split())
    except OSError:
        return frozenset()


def scope_command(unit: str, description: str) -> list[str]:
    """Return the words that start a command as the first of a new scope. It goes away with its last process."""
    properties = ("Delegate=yes", "TasksMax=infinity", "CollectMode=inactive-or-failed", f"Description={description}")
    words = [word for each in properties for word in ("-p", each)]
    return ["systemd-run", "--quiet", "--scope", "--slice=system.slice", f"--unit={unit}", *words, "--"]


LINGER = Path("/var/lib/systemd/linger")  # a file for each user whose own systemd outlives their sessions
KILLS = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager", "KillUserProcesses")


def user_scope_command(user: str, linger: Path = LINGER) -> list[str]:
    """Return the words that start a plain user's command outside of the login session; none where the user's own
    systemd would end with the session too."""
    if not (SYSTEMD_RUNS.is_dir() and (linger / user).exists()):
        return []
    return ["systemd-run", "--user", "--quiet", "--scope", "--collect", "--"]


def ends_with_session(runner: Runner, user: str) -> bool:
    """Return whether logind will kill what a plain user starts when the session ends."""
    if not SYSTEMD_RUNS.is_dir() or user_scope_command(user) or shutil.which("busctl") is None:
        return False
    return runner.run(["busctl", "get-property", *KILLS], timeout_s=30).stdout.strip() == "b true"


def cluster_folders(cluster_id: str, mounted: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Return every folder of a cluster, whatever the machine was like when it was made."""
    name = f"dalsegno-{cluster_id}"
    patterns = (name, f"*/{name}", f"system.slice/{name}.scope", f"*/system.slice/{name}.scope")
    return [path for pattern in patterns for path in mounted.glob(pattern)]


def remove_cgroup(root: Path) -> None:
    """Remove a folder with all below it, deepest first, as soon as each is free."""
    until = time.monotonic() + REMOVE_S
    for path in _deepest_first([root]):
        while not _removed(path) and time.monotonic() < until:
            time.sleep(0.01)


def _deepest_first(roots: Iterable[Path]) -> Sequence[Path]:
    found: list[Path] = []
    for root in roots:
        with contextlib.suppress(OSError):  # systemd, too, removes what is empty
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
