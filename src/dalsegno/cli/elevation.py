"""Run a command again as root, through sudo, if the cluster that it uses or creates needs root."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from typing import TYPE_CHECKING

from dalsegno.cli import out
from dalsegno.errors import DalsegnoError

if TYPE_CHECKING:
    from dalsegno.cluster import ClusterPlace
    from dalsegno.spec.facts import Cluster
    from dalsegno.targets.base import Target

AGAIN = "`sudo -v`, then the same command again"


def elevate_to_make(place: ClusterPlace, cluster: Cluster, target: Target) -> None:
    """Run this command again as root if the cluster runs as root, or if a new cluster can do more as root.

    If sudo refuses, a new cluster is created without root. If its target has a substitute for what needs root, print
    the name of the substitute.
    """
    if place.folder.exists():
        elevate_to_change(place)
        return
    use = target.root_use(cluster)
    if use is None or not _may_elevate():
        return
    why_not = _continue_as_root(f"{use.needs} need root")
    if use.instead:
        out.talk(f"nodes will be {use.instead}, not {use.needs}: these need root, and {why_not}")
        out.advise(f"for {use.needs}: {AGAIN}")


def elevate_to_change(place: ClusterPlace) -> None:
    """Run this command again as root if the cluster belongs to the user but runs as root. Raise an error if sudo
    refuses."""
    from dalsegno.cluster import owner_of

    if not _may_elevate() or not place.folder.exists() or os.access(place.folder, os.W_OK):
        return
    if owner_of(place) == os.geteuid():
        why_not = _continue_as_root(f"{place.name} runs as root")
        raise DalsegnoError(f"cluster {place.name} is yours, but it runs as root, and {why_not}", hint=AGAIN)


def elevate_for_cluster(name: str | None) -> None:
    """Call `elevate_to_change` for the named cluster, and ignore errors. The caller also works on a Slurm cluster that
    Dal Segno did not create."""
    from dalsegno.cluster import find_place

    with contextlib.suppress(DalsegnoError):
        place = find_place(name)
        elevate_to_change(place)


def _may_elevate() -> bool:
    """Return whether this process may use sudo: on Linux, if it does not run as root and DALSEGNO_HOME is not set. With
    DALSEGNO_HOME, root would use a folder that others may control."""
    return platform.system() == "Linux" and os.geteuid() != 0 and not os.environ.get("DALSEGNO_HOME")


def _continue_as_root(why: str) -> str:
    """Replace this process with the same command under sudo. If sudo refuses, return the reason."""
    from dalsegno.programs import own_argv
    from dalsegno.system.execute import become, refusal, sudo_command
    from dalsegno.system.processes import LocalRunner

    why_not = refusal(LocalRunner())
    if why_not:
        return why_not
    out.talk(f"{why}: continuing with sudo")
    argv = sudo_command([*own_argv(), *sys.argv[1:]], os.environ, os.getuid(), os.getgid())
    become(argv, os.environ)
