"""Open targets. Outside its own package, a target is imported only here, and only when it is needed."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.system.files import read_json
from dalsegno.targets.folder import ClusterFolder, read_target

if TYPE_CHECKING:
    from dalsegno.targets.base import Target


def open_target(kind: str, folder: Path) -> Target:
    """Return a target of this kind for the cluster in this state folder."""
    if kind == "existing":
        raise TargetError(
            "this cluster file describes a cluster that Dal Segno did not create, and changes nothing on it",
            hint="use `dalsegno run` on it as it is; `dalsegno adopt watch` watches its nodes",
        )
    if kind == "ssh":
        return _open_ssh(folder)
    if kind == "hyperpod":
        return _open_hyperpod(folder)
    if kind == "oci":
        from dalsegno.targets.oci.target import OciTarget

        return OciTarget(folder)
    if kind == "parallelcluster":
        return _open_parallelcluster(folder)
    if platform.system() != "Linux":
        raise TargetError(
            f"`target: local` needs Linux, and this is {platform.system()}", hint="use a remote target from here"
        )
    from dalsegno.targets.local import LocalTarget

    return LocalTarget(folder, cache=folder.parents[1] / "cache")


def _open_ssh(folder: Path) -> Target:
    """Return the operator's side of a cluster on ssh hosts, or on its head, the head's."""
    from dalsegno.targets.ssh.folder import SshRole, read_ssh_state

    try:
        state = read_ssh_state(ClusterFolder(folder))
    except DalsegnoError:
        state = None  # damaged, which the target reports
    if state is not None and state.role is SshRole.HEAD:
        from dalsegno.targets.ssh.head import HeadTarget

        return HeadTarget(folder)
    from dalsegno.targets.ssh.target import SshTarget

    return SshTarget(folder)


def _open_hyperpod(folder: Path) -> Target:
    """Return the operator's side of a HyperPod cluster, or on its controller instance, that side."""
    from dalsegno.targets.hyperpod.folder import HyperPodRole, read_hyperpod_state

    try:
        state = read_hyperpod_state(ClusterFolder(folder))
    except DalsegnoError:
        state = None  # damaged, which the target reports
    if state is not None and state.role is HyperPodRole.HEAD:
        from dalsegno.targets.hyperpod.head import HyperPodHead

        return HyperPodHead(folder)
    from dalsegno.targets.hyperpod.target import HyperPodTarget

    return HyperPodTarget(folder)


def _open_parallelcluster(folder: Path) -> Target:
    """Return the operator's side of a cluster on ParallelCluster, or on its head node, the head's."""
    from dalsegno.targets.parallelcluster.folder import PclusterSide, read_state

    try:
        state = read_state(ClusterFolder(folder))
    except DalsegnoError:
        state = None  # damaged, which the target reports
    if state is not None and state.role is PclusterSide.HEAD:
        from dalsegno.targets.parallelcluster.head import PclusterHead

        return PclusterHead(folder)
    from dalsegno.targets.parallelcluster.target import PclusterTarget

    return PclusterTarget(folder)


def is_elsewhere(folder: Path) -> bool:
    """Return whether the cluster of this state folder is used on another machine, without opening its target."""
    try:
        value = read_json(ClusterFolder(folder).state)
    except (DalsegnoError, OSError):
        return False
    return isinstance(value, dict) and value.get("role") == "operator"


def open_existing(folder: Path) -> Target:
    """Return the target of an existing cluster, complete or not."""
    return open_target(read_target(ClusterFolder(folder)), folder)
