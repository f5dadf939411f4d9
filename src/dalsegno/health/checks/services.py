"""What jobs on a node depend on: slurmd, munge, names."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from dalsegno.health.check import ALWAYS, Check, Context
from dalsegno.health.checks.late import PATIENCE_S, ask_twice
from dalsegno.health.result import Remedy, Result, failed, passed, warned
from dalsegno.health.world import NodeWorld
from dalsegno.system.apart import Late, NoAnswer

# slurmd itself waits for a prolog: it need not be asked, and Slurm's commands must not be.
BESIDE_PROLOG = ALWAYS - {Context.PROLOG}

# munge's own words for a munged that is too busy to answer in time, or to take one more connection.
_TOO_SLOW = re.compile(r"timed[ -]?out|temporarily unavailable", re.IGNORECASE)


def ask_slurmd(world: NodeWorld) -> tuple[str, bool]:
    """Whether somebody listens on its port, as the kernel says. To call it would fill its log: it complains of callers
    who say nothing."""
    if world.expected.slurmd is None:
        raise NoAnswer(world.expected.untold or "slurm.conf does not tell where slurmd should answer")
    address, port = world.expected.slurmd
    return f"{address}:{port}", port in world.listening()


@dataclass(frozen=True)
class MungeAnswer:
    """What unmunge, or the command that failed, printed. `late`: munged gave no answer in time."""

    said: str
    late: bool = False


def ask_munge(world: NodeWorld) -> MungeAnswer:
    """Encode a credential and decode it."""
    if world.expected.munge is None:
        raise NoAnswer(world.expected.untold)
    socket = [f"--socket={world.expected.munge}"] if world.expected.munge else []

    def encode_and_decode(timeout_s: float) -> str:
        made = world.run(("munge", "-n", *socket), timeout_s=timeout_s)
        if made.exit_code == 0:
            made = world.run(("unmunge", *socket), stdin=made.stdout, timeout_s=timeout_s)
        said = made.stdout + made.stderr
        if _TOO_SLOW.search(said):
            raise Late(" ".join(said.split()))
        return said

    try:
        return MungeAnswer(ask_twice(world, encode_and_decode))
    except Late as error:
        return MungeAnswer(str(error), late=True)


def needs_munge(world: NodeWorld) -> bool:
    """So does a cluster of which nothing is known, as far as anybody can tell."""
    expected = world.expected
    return expected.munge is not None or bool(expected.untold and not expected.controllers)


@dataclass(frozen=True)
class Names:
    """An address for each host that the node must find, and for itself; "" for one that it does not find."""

    controllers: Mapping[str, str]
    own: str
    own_address: str


def ask_names(world: NodeWorld) -> Names:
    own = world.read("/proc/sys/kernel/hostname").strip()
    controllers = {name: _address(world, name) for name in world.expected.controllers}
    return Names(controllers, own, controllers.get(own) or _address(world, own))


def _address(world: NodeWorld, name: str) -> str:
    try:
        done = ask_twice(world, lambda timeout_s: world.run(("getent", "ahosts", name), timeout_s=timeout_s))
    except Late:
        return ""
    if done.exit_code not in (0, 2):
        raise NoAnswer(f"`getent ahosts {name}` ended with {done.exit_code}")
    if done.exit_code == 0 and not re.match(r"[0-9a-fA-F:.%\w]+\s", done.stdout):
        raise NoAnswer(f"`getent ahosts {name}` is not understood")
    return done.stdout.split()[0] if done.exit_code == 0 else ""


def judge_slurmd(answer: tuple[str, bool]) -> Result:
    where, listens = answer
    return passed(f"slurmd listens at {where}") if listens else failed(f"no slurmd at {where}", Remedy.REBOOT)


def judge_munge(answer: MungeAnswer) -> Result:
    text = answer.said
    if answer.late:
        return failed(f"munge: {text}", Remedy.REBOOT)
    if re.search(r"^STATUS:\s+Success", text, re.MULTILINE):
        return passed("munge makes and reads credentials")
    if found := re.search(r"^STATUS:\s+(.+)$|[Mm]unge: Error: (.+)$", text, re.MULTILINE):
        return failed(f"munge: {found[1] or found[2]}", Remedy.REBOOT)
    raise ValueError(f"unmunge says {text[:80]!r}")


def judge_names(names: Names) -> Result:
    if missing := [name for name, address in names.controllers.items() if not address]:
        return failed(f"no address is found for {', '.join(missing)}", Remedy.DRAIN)
    return passed("host names are found") if names.own_address else warned(f"nobody knows this host's name {names.own}")


SERVICE_CHECKS = (
    Check(
        "slurmd", "it answers", ask_slurmd, judge_slurmd, BESIDE_PROLOG, 1,
        applies=lambda world: world.expected.named or bool(world.expected.untold), settle_s=5,
    ),
    Check(
        "munge", "a credential, made and read", ask_munge, judge_munge, every_s=10,
        applies=needs_munge, settle_s=5,
    ),
    Check("host-names", "the cluster's names are found", ask_names, judge_names, every_s=30, settle_s=10),
)  # fmt: skip


# ---- Shared file systems: mounted, and answering.


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


def ask_shared(world: NodeWorld) -> Mapping[str, FsAnswer]:
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


def _stat(world: NodeWorld, target: str) -> FsAnswer:
    argv = ("stat", "--file-system", "--format=%T", target)
    try:
        done = ask_twice(world, lambda timeout_s: world.run(argv, timeout_s=timeout_s))
    except Late:
        return FsAnswer(FsState.HANGS, f"does not answer within {PATIENCE_S:g} s")
    if done.exit_code == 0:
        return FsAnswer(FsState.ANSWERS)
    return FsAnswer(FsState.FAILS, done.stderr.strip() or done.stdout.strip() or "cannot be read")


def _fstab(world: NodeWorld) -> str:
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


# ---- Can containers be run here?


@dataclass(frozen=True)
class ContainerTools:
    """`enroot` is its version, "" if it does not start, None where it is not; `missing`: plugins that Slurm needs."""

    enroot: str | None
    namespaces: int  # that may be made
    missing: tuple[str, ...] = ()


def has_containers(world: NodeWorld) -> bool:
    return world.has("enroot") or bool(_plugins(world))


def ask_containers(world: NodeWorld) -> ContainerTools:
    missing = [path for path in _plugins(world) if posixpath.basename(path) not in world.names(posixpath.dirname(path))]
    allowed = int(world.read("/proc/sys/user/max_user_namespaces"))
    return ContainerTools(_enroot(world), allowed, tuple(missing))


def _enroot(world: NodeWorld) -> str | None:
    if not world.has("enroot"):
        return None
    done = world.run(("enroot", "version"))
    if done.exit_code == 0 and not done.stdout.strip():
        raise NoAnswer("`enroot version` says nothing")
    return done.stdout.strip() if done.exit_code == 0 else ""


def _plugins(world: NodeWorld) -> list[str]:
    """Those without which no job starts: the `required` ones of plugstack.conf, beside slurm.conf."""
    folder = posixpath.dirname(world.env.get("SLURM_CONF") or "/etc/slurm/slurm.conf")
    try:
        lines = world.read(f"{folder}/plugstack.conf").splitlines()
    except NoAnswer:
        return []
    return [
        words[1] for line in lines if (words := line.split())[:1] == ["required"] and words[1:2] and words[1][0] == "/"
    ]


def judge_containers(found: ContainerTools) -> Result:
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
