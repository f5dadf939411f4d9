"""Open targets. A target's package is imported only by this module and by its own modules, and only when it is
needed."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.errors import TargetError
from dalsegno.targets.folder import ClusterFolder, ClusterRole, read_role, read_target

if TYPE_CHECKING:
    from dalsegno.targets.base import Target


def open_target(kind: str, folder: Path) -> Target:
    """Return a target of this kind for the cluster in this state folder."""
    if kind == "existing":
        raise TargetError(
            "this cluster file describes a cluster that Dal Segno did not create, and changes nothing on it",
            hint="use `dalsegno run` on it as it is; `dalsegno adopt watch` watches its nodes",
        )
    if kind in ("ssh", "parallelcluster", "hyperpod", "oci"):
        on_head = read_role(ClusterFolder(folder)) is ClusterRole.HEAD
        return _open_on_head(kind, folder) if on_head else _open_from_operator(kind, folder)
    if platform.system() != "Linux":
        raise TargetError(
            f"`target: local` needs Linux, and this is {platform.system()}", hint="use a remote target from here"
        )
    from dalsegno.targets.local import LocalTarget

    return LocalTarget(folder, cache=folder.parents[1] / "cache")


def _open_from_operator(kind: str, folder: Path) -> Target:
    if kind == "ssh":
        from dalsegno.targets.ssh.target import SshTarget

        return SshTarget(folder)
    if kind == "hyperpod":
        from dalsegno.targets.hyperpod.target import HyperPodTarget

        return HyperPodTarget(folder)
    if kind == "oci":
        from dalsegno.targets.oci.target import OciTarget

        return OciTarget(folder)
    from dalsegno.targets.parallelcluster.target import PclusterTarget

    return PclusterTarget(folder)


def _open_on_head(kind: str, folder: Path) -> Target:
    if kind == "ssh":
        from dalsegno.targets.ssh.head import HeadTarget

        return HeadTarget(folder)
    if kind == "hyperpod":
        from dalsegno.targets.hyperpod.head import HyperPodHead

        return HyperPodHead(folder)
    if kind == "parallelcluster":
        from dalsegno.targets.parallelcluster.head import PclusterHead

        return PclusterHead(folder)
    if kind == "oci":
        from dalsegno.targets.oci.head import OciHead

        return OciHead(folder)
    raise TargetError(f"`target: {kind}` has no side on the head", hint="use it from the machine of `dalsegno up`")


def is_elsewhere(folder: Path) -> bool:
    """Return whether the cluster of this state folder is used on another machine. Its target is not opened."""
    return read_role(ClusterFolder(folder)) is ClusterRole.OPERATOR


def open_existing(folder: Path) -> Target:
    """Return the target of an existing cluster, complete or not."""
    return open_target(read_target(ClusterFolder(folder)), folder)
