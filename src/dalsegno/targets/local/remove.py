"""Taking single hosts away from a cluster that goes on."""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.system.cgroups import cluster_folders, remove_cgroup
from dalsegno.system.children import end
from dalsegno.system.files import remove_tree
from dalsegno.system.hosts import host_process
from dalsegno.targets.local.folder import Folder


def remove_hosts(folder: Folder, names: Sequence[str]) -> None:
    """End each host's first process, and so all of it; its cable goes with it."""
    living = [process for name in names if (process := host_process(folder.host(name))) is not None]
    end(living)
    for name in names:
        remove_cgroups_of(folder, name)
        remove_tree(folder.host(name))
        folder.agent_secret(name).unlink(missing_ok=True)


def remove_cgroups_of(folder: Folder, host: str) -> None:
    for base in cluster_folders(folder.id):
        remove_cgroup(base / host)
