"""Can containers be run here?"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from dalsegno.health.check import ALWAYS, Check
from dalsegno.health.result import Remedy, Result, failed, passed
from dalsegno.health.world import World
from dalsegno.system.apart import NoAnswer


@dataclass(frozen=True)
class Containers:
    """`enroot` is its version, "" if it does not start, None where it is not; `missing`: plugins that Slurm needs."""

    enroot: str | None
    namespaces: int  # that may be made
    missing: tuple[str, ...] = ()


def has_containers(world: World) -> bool:
    return world.has("enroot") or bool(_plugins(world))


def ask_containers(world: World) -> Containers:
    missing = [path for path in _plugins(world) if posixpath.basename(path) not in world.names(posixpath.dirname(path))]
    allowed = int(world.read("/proc/sys/user/max_user_namespaces"))
    return Containers(_enroot(world), allowed, tuple(missing))


def _enroot(world: World) -> str | None:
    if not world.has("enroot"):
        return None
    done = world.run(("enroot", "version"))
    if done.exit_code == 0 and not done.stdout.strip():
        raise NoAnswer("`enroot version` says nothing")
    return done.stdout.strip() if done.exit_code == 0 else ""


def _plugins(world: World) -> list[str]:
    """Those without which no job starts: the `required` ones of plugstack.conf, beside slurm.conf."""
    folder = posixpath.dirname(world.env.get("SLURM_CONF") or "/etc/slurm/slurm.conf")
    try:
        lines = world.read(f"{folder}/plugstack.conf").splitlines()
    except NoAnswer:
        return []
    return [
        words[1] for line in lines if (words := line.split())[:1] == ["required"] and words[1:2] and words[1][0] == "/"
    ]


def judge_containers(found: Containers) -> Result:
    if found.missing:
        return failed(f"Slurm's plugin {found.missing[0]} is not there: no job can start", Remedy.DRAIN, "plugin")
    if found.enroot == "" or found.namespaces < 1:
        why = "enroot does not start" if found.namespaces else "user namespaces are forbidden"
        return failed(f"containers cannot be run: {why}", Remedy.DRAIN)
    if found.enroot and not re.match(r"\d", found.enroot):
        raise ValueError(f"enroot says it is version {found.enroot!r}")
    return passed(f"enroot {found.enroot} can be used" if found.enroot else "Slurm's plugins are there")


CONTAINER_CHECKS = (
    Check("containers", "they can be run", ask_containers, judge_containers, ALWAYS, 60, has_containers, settle_s=10),
)
