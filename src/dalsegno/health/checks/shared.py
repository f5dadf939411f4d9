"""Shared file systems: mounted, and answering."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from dalsegno.health.check import Check
from dalsegno.health.checks.late import PATIENCE_S, ask_twice
from dalsegno.health.result import Remedy, Result, failed, passed
from dalsegno.health.world import World
from dalsegno.system.apart import Late, NoAnswer

SHARED = re.compile(
    r"nfs4?|lustre|beegfs|gpfs|ceph|cifs|smb3|9p|wekafs|glusterfs"
    r"|fuse(?!\.(lxcfs|snapfuse|gvfsd-fuse|portal|squashfuse|fuse-overlayfs)$|ctl|blk)(\..+)?"
)
MOST_ASKED = 32
MOST_HANGING = 2  # then the rest is not asked: a prolog has no more time


class FsState(Enum):
    """How a shared file system is."""

    ANSWERS = "answers"
    HANGS = "hangs"
    FAILS = "fails"
    NOT_MOUNTED = "not mounted"


@dataclass(frozen=True)
class FsAnswer:
    """What a shared file system answered. `text` is for people, and empty where all is well."""

    state: FsState
    text: str = ""


class Mount(NamedTuple):
    source: str
    target: str
    kind: str
    options: str


def _mounts(text: str) -> list[Mount]:
    """Of /proc/mounts or fstab; blanks in a name are written `\\040`."""
    rows = [line.split() for line in text.splitlines() if line.strip()]
    return [Mount(row[0], row[1].replace("\\040", " "), row[2], row[3]) for row in rows]


def _is_shared(mount: Mount) -> bool:
    """A user's own mount is the user's affair: nobody may have a node drained by one that hangs."""
    users = mount.kind.startswith("fuse") and re.search(r"\buser_id=(?!0\b)", mount.options)
    return SHARED.fullmatch(mount.kind) is not None and not users


def ask_shared(world: World) -> Mapping[str, FsAnswer]:
    """Every shared file system that is mounted or should be: whether it answers, or what it says."""
    mounts = [mount for mount in _mounts(world.read("/proc/self/mounts")) if _is_shared(mount)]
    mounted = [mount.target for mount in mounts]
    wanted = [mount.target for mount in _mounts(_fstab(world)) if _is_shared(mount)]
    absent = FsAnswer(FsState.NOT_MOUNTED, "is not mounted")
    found = {target: absent for target in wanted if target not in mounted}
    hanging = 0
    once = {mount.source: mount.target for mount in reversed(mounts)}  # one may be mounted in many places
    for target in list(once.values())[:MOST_ASKED]:
        if hanging < MOST_HANGING:
            found[target] = _stat(world, target)
            hanging += found[target].state is FsState.HANGS
    return found


def _stat(world: World, target: str) -> FsAnswer:
    argv = ("stat", "--file-system", "--format=%T", target)
    try:
        done = ask_twice(world, lambda timeout_s: world.run(argv, timeout_s=timeout_s))
    except Late:
        return FsAnswer(FsState.HANGS, f"does not answer within {PATIENCE_S:g} s")
    if done.exit_code == 0:
        return FsAnswer(FsState.ANSWERS)
    return FsAnswer(FsState.FAILS, done.stderr.strip() or done.stdout.strip() or "cannot be read")


def _fstab(world: World) -> str:
    try:
        lines = world.read("/etc/fstab").splitlines()
    except NoAnswer:
        return ""
    return "\n".join(line for line in lines if not line.lstrip().startswith("#") and "noauto" not in line)


def judge_shared(answers: Mapping[str, FsAnswer]) -> Result:
    bad = [f"{target} {each.text}" for target, each in answers.items() if each.state is not FsState.ANSWERS]
    if bad:
        return failed("; ".join(bad[:4]), Remedy.REBOOT)
    return passed(f"{len(answers)} shared file systems answer" if answers else "no shared file system is mounted")


SHARED_CHECKS = (
    Check("file-systems", "shared ones are mounted, and answer", ask_shared, judge_shared, every_s=10, settle_s=5),
)
