"""Taking single hosts away from a cluster that goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dalsegno.system.files import remove_tree
from dalsegno.system.hosts import host_process
from dalsegno.system.procfs import end
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.sweep import remove_cgroup


def remove_hosts(folder: Folder, names: Sequence[str]) -> None:
    """End each host's first process, and so all of it; its cable goes with it."""
    living = [process for name in names if (process := host_process(folder.host(name))) is not None]
    end(living)
    for name in names:
        remove_cgroups_of(folder, name)
        remove_tree(folder.host(name))
        folder.agent_secret(name).unlink(missing_ok=True)


def remove_cgroups_of(folder: Folder, host: str) -> None:
    for cgroup in Path("/sys/fs/cgroup").glob(f"*/dalsegno-{folder.id}/{host}"):
        remove_cgroup(cgroup)
