"""The folders that all users can write to, on new file systems. Pure."""

from __future__ import annotations

from dalsegno.setup.node_plan import PlannedFolder
from dalsegno.spec.facts import Cluster

SHARED = "shared"


def shared_folders(cluster: Cluster) -> tuple[PlannedFolder, ...]:
    """Return a folder for each new FSx for Lustre file system, because only root can write to the file system's top
    folder.

    As in /tmp, users can delete only their own files there. A file system with homes needs no such folder.
    """
    made = [each for each in cluster.storage if each.type == "lustre" and not each.source and not each.home]
    return tuple(PlannedFolder(f"{each.mount}/{SHARED}", 0o1777, keep=True) for each in made)
