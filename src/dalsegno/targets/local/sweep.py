"""Remove a local cluster, complete or not: processes, links, cgroups, files."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Collection

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.system.cgroups import cluster_folders, read_cgroups, remove_cgroup
from dalsegno.system.children import (
    MARK,
    Process,
    arguments,
    descendants,
    end,
    environment,
    find,
    marked,
    owner,
    start_ticks,
    stop,
)
from dalsegno.system.files import read_json, remove_tree
from dalsegno.system.hosts import INIT
from dalsegno.system.processes import Runner
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.storage import remove_mount_points

LINK_GONE_S = 5.0


def sweep(runner: Runner, folder: Folder) -> bool:
    """Remove everything that belongs to the cluster. Return False if there was nothing. This needs only the path of the
    state folder."""
    found = folder.root.exists()
    found |= end_processes(folder)
    if os.geteuid() == 0:
        found |= remove_links(runner, folder)
        found |= remove_cgroups(runner, folder)
    if os.geteuid() == 0:
        remove_mount_points(folder)
    remove_tree(folder.devices)
    remove_tree(folder.root)
    return found


def end_processes(folder: Folder) -> bool:
    """Kill all processes of the cluster, and their descendants. Return whether there were any.

    Search again until none is found, because a daemon may fork during a search. If a virtual host's first process dies,
    the kernel kills the host's other processes.
    """
    found = False
    for _ in range(20):
        processes = _with_children(_ours(folder))
        if not processes:
            return found
        found = True
        end(processes)
    raise TargetError(
        f"processes of {folder.name} do not end: {[process.pid for process in processes]}",
        hint="they may hang in the kernel, as on a dead file system; run `dalsegno down` again when they are gone",
    )


def end_strays(folder: Folder, hosts: list[Process], *, loopback: bool) -> None:
    """End processes that a killed `up` or a dead loopback host left running.

    Call this before hosts are booted. On loopback ports, job steps are kept for the next slurmd, and coordinators of
    runs with their children are kept for the next controller.
    """
    spared = [*hosts, *(process for process in coordinators(folder) if loopback)]
    known = {pid for process in spared for pid in (process.pid, *descendants(process.pid))}
    strays = [process for process in marked(str(folder.root)) if process.pid not in known]
    if not loopback:  # end only the first process of a virtual host, because its daemons end with it
        strays = [process for process in strays if INIT in " ".join(arguments(process.pid))]
    stop(process for process in strays if not " ".join(arguments(process.pid)).startswith("slurmstepd"))


def coordinators(folder: Folder) -> list[Process]:
    """Return the running coordinators that the controller recorded. On virtual hosts there are none: the records have
    PIDs of another namespace, and coordinators end with their host."""
    found = []
    for path in folder.runs.glob("*.json"):
        with contextlib.suppress(DalsegnoError, OSError):  # skip a record that is damaged or was just removed
            fact = read_json(path)
            pid, start = (fact.get("pid"), fact.get("start")) if isinstance(fact, dict) else (None, None)
            if isinstance(pid, int) and isinstance(start, int):
                found.append(Process(pid, start))
    return [process for process in found if process.alive()]


def _ours(folder: Folder) -> list[Process]:
    kept = {process.pid for process in coordinators(folder)}
    return find(lambda pid: _is_ours(pid, folder, kept))


def _is_ours(pid: int, folder: Folder, kept: Collection[int]) -> bool:
    """Return whether the process belongs to this cluster: Dal Segno started it, or it is a task of one of the cluster's
    jobs. A task counts even if it has left its step's session.

    Any user can set the variable MARK, so another user's process counts only if it is a recorded coordinator (`kept`).
    """
    env = environment(pid)
    if f"{MARK}={folder.root}".encode() in env:
        return owner(pid) == os.geteuid() or pid in kept
    return f"SLURM_CONF={folder.slurm_conf}".encode() in env and any(
        item.startswith(b"SLURMD_NODENAME=") for item in env
    )


def _with_children(processes: list[Process]) -> list[Process]:
    """Return the processes and all their descendants.

    Job steps below slurmstepd are found only as descendants: they have the user's environment, which lacks the variable
    MARK.
    """
    own = {process.pid for process in processes}
    below = {child for pid in own for child in descendants(pid)} - own - {os.getpid()}
    return processes + [Process(pid, start) for pid in below if (start := start_ticks(pid)) is not None]


def remove_links(runner: Runner, folder: Folder) -> bool:
    """Remove the machine's end of the link; return whether there was one.

    The kernel removes the link with the switch. If it has not done so within a time limit, delete the link.
    """
    prefix = f"ds{folder.id}"
    until = time.monotonic() + LINK_GONE_S
    found = False
    while mine := [name for _, name in socket.if_nameindex() if name.startswith(prefix)]:
        found = True
        if time.monotonic() > until:
            runner.run(["ip", "link", "del", mine[0]], timeout_s=30)
        time.sleep(0.01)
    return found


def remove_cgroups(runner: Runner, folder: Folder) -> bool:
    """Remove the cluster's folders in every cgroup hierarchy, and its systemd scope, which systemd would remove only
    later."""
    found = cluster_folders(folder.id)
    unit = read_cgroups().place(folder.id).unit
    if unit and any(path.name == unit for path in found):
        runner.run(["systemctl", "stop", unit], timeout_s=30)
    for root in found:
        remove_cgroup(root)
    return bool(found)
