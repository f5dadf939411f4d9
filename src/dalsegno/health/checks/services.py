"""What jobs on a node depend on: slurmd, munge, shared file systems, containers, names."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dalsegno.health.check import ALWAYS, Check, Context
from dalsegno.health.result import Remedy, Result, failed, passed, warned
from dalsegno.health.world import World
from dalsegno.system.apart import Late, NoAnswer
from dalsegno.system.processes import Completed

# slurmd itself waits for a prolog: it need not be asked, and Slurm's commands must not be.
BESIDE_PROLOG = ALWAYS - {Context.PROLOG}
ANSWERS = "answers"
LISTEN = "0A"  # in /proc/net/tcp
SHARED = re.compile(
    r"nfs4?|lustre|beegfs|gpfs|ceph|cifs|smb3|9p|wekafs|glusterfs"
    r"|fuse(?!\.(lxcfs|snapfuse|gvfsd-fuse|portal|squashfuse|fuse-overlayfs)$|ctl|blk)(\..+)?"
)
PATIENCE_S = 1.25  # for one answer; a machine may be busy, so that each is asked for twice
MOST_ASKED = 32
MOST_HANGING = 2  # then the rest is not asked: a prolog has no more time


# Questions ----------------------------------------------------------------------------------------------------------


def ask_slurmd(world: World) -> tuple[str, bool]:
    """Whether somebody listens on its port, as the kernel says. To call it would fill its log: it complains of callers
    who say nothing."""
    if world.expected.slurmd is None:
        raise NoAnswer("slurm.conf does not tell where slurmd should answer")
    address, port = world.expected.slurmd
    return f"{address}:{port}", port in listening(world.read("/proc/net/tcp")) | listening(_tcp6(world))


def _tcp6(world: World) -> str:
    try:
        return world.read("/proc/net/tcp6")
    except NoAnswer:
        return ""  # a kernel without IPv6


def listening(table: str) -> set[int]:
    """The ports in /proc/net/tcp on which somebody listens."""
    rows = [line.split() for line in table.splitlines()[1:] if line.strip()]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTEN}


def ask_munge(world: World) -> str:
    """A credential, made and read; what unmunge, or the one that failed, says."""
    socket = [f"--socket={world.expected.munge}"] if world.expected.munge else []
    try:
        made = _twice(world, ("munge", "-n", *socket))
        if made.exit_code != 0:
            return made.stdout + made.stderr
        read = _twice(world, ("unmunge", *socket), made.stdout)
        return read.stdout + read.stderr
    except Late as error:
        return f"munge: Error: {error}"


def ask_shared(world: World) -> Mapping[str, str]:
    """Every shared file system that is mounted or should be: whether it answers, or what it says."""
    mounts = [mount for mount in _mounts(world.read("/proc/self/mounts")) if _is_shared(mount)]
    mounted = [mount.target for mount in mounts]
    wanted = [mount.target for mount in _mounts(_fstab(world)) if _is_shared(mount)]
    found = {target: "is not mounted" for target in wanted if target not in mounted}
    hanging = 0
    once = {mount.source: mount.target for mount in reversed(mounts)}  # one may be mounted in many places
    for target in list(once.values())[:MOST_ASKED]:
        if hanging < MOST_HANGING:
            found[target] = _stat(world, target)
            hanging += found[target].startswith("does not answer")
    return found


def _twice(world: World, argv: tuple[str, ...], stdin: str | None = None) -> Completed:
    try:
        return world.run(argv, stdin=stdin, timeout_s=PATIENCE_S)
    except Late:
        return world.run(argv, stdin=stdin, timeout_s=PATIENCE_S)


def _stat(world: World, target: str) -> str:
    try:
        done = _twice(world, ("stat", "--file-system", "--format=%T", target))
    except Late:
        return f"does not answer within {PATIENCE_S:g} s"
    return ANSWERS if done.exit_code == 0 else (done.stderr.strip() or done.stdout.strip() or "cannot be read")


def _fstab(world: World) -> str:
    try:
        lines = world.read("/etc/fstab").splitlines()
    except NoAnswer:
        return ""
    return "\n".join(line for line in lines if not line.lstrip().startswith("#") and "noauto" not in line)


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


def ask_names(world: World) -> Mapping[str, str]:
    """An address for each host that the node must find, "" for one that it does not."""
    own = world.read("/proc/sys/kernel/hostname").strip()
    return {name: _address(world, name) for name in dict.fromkeys((*world.expected.controllers, own))}


def _address(world: World, name: str) -> str:
    try:
        done = _twice(world, ("getent", "ahosts", name))
    except Late:
        return ""
    if done.exit_code not in (0, 2):
        raise NoAnswer(f"`getent ahosts {name}` ended with {done.exit_code}")
    if done.exit_code == 0 and not re.match(r"[0-9a-fA-F:.%\w]+\s", done.stdout):
        raise NoAnswer(f"`getent ahosts {name}` is not understood")
    return done.stdout.split()[0] if done.exit_code == 0 else ""


# Judges ---------------------------------------------------------------------------------------------------------------


def judge_slurmd(answer: tuple[str, bool]) -> Result:
    where, listens = answer
    return passed(f"slurmd listens at {where}") if listens else failed(f"no slurmd at {where}", Remedy.REBOOT)


def judge_munge(text: str) -> Result:
    if re.search(r"^STATUS:\s+Success", text, re.MULTILINE):
        return passed("munge makes and reads credentials")
    if found := re.search(r"^STATUS:\s+(.+)$|[Mm]unge: Error: (.+)$", text, re.MULTILINE):
        return failed(f"munge: {found[1] or found[2]}", Remedy.REBOOT)
    raise ValueError(f"unmunge says {text[:80]!r}")


def judge_shared(answers: Mapping[str, str]) -> Result:
    bad = [f"{target} {said}" for target, said in answers.items() if said != ANSWERS]
    if bad:
        return failed("; ".join(bad[:4]), Remedy.REBOOT)
    return passed(f"{len(answers)} shared file systems answer" if answers else "no shared file system is mounted")


def judge_containers(found: Containers) -> Result:
    if found.missing:
        return failed(f"Slurm's plugin {found.missing[0]} is not there: no job can start", Remedy.DRAIN, "plugin")
    if found.enroot == "" or found.namespaces < 1:
        why = "enroot does not start" if found.namespaces else "user namespaces are forbidden"
        return failed(f"containers cannot be run: {why}", Remedy.DRAIN)
    if found.enroot and not re.match(r"\d", found.enroot):
        raise ValueError(f"enroot says it is version {found.enroot!r}")
    return passed(f"enroot {found.enroot} can be used" if found.enroot else "Slurm's plugins are there")


def judge_names(addresses: Mapping[str, str]) -> Result:
    *controllers, own = addresses
    if missing := [name for name in controllers if not addresses[name]]:
        return failed(f"no address is found for {', '.join(missing)}", Remedy.DRAIN)
    return passed("host names are found") if addresses[own] else warned(f"the host does not find its own name {own}")


SERVICE_CHECKS = (
    Check(
        "slurmd", "it answers", ask_slurmd, judge_slurmd, BESIDE_PROLOG, 1,
        applies=lambda world: world.expected.named, settle_s=5,
    ),
    Check(
        "munge", "a credential, made and read", ask_munge, judge_munge, every_s=10,
        applies=lambda world: world.expected.munge is not None, settle_s=5,
    ),
    Check("file-systems", "shared ones are mounted, and answer", ask_shared, judge_shared, every_s=10, settle_s=5),
    Check(
        "containers", "they can be run", ask_containers, judge_containers, every_s=60,
        applies=has_containers, settle_s=10,
    ),
    Check("host-names", "the cluster's names are found", ask_names, judge_names, every_s=30, settle_s=10),
)  # fmt: skip
