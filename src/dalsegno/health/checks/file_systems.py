"""The check of shared file systems: each must be mounted and answer.

If an NFS file system does not answer, its server is asked too. If the server does not answer either, the node needs no
repair: it recovers when the server answers again. The check fails only after the server has been silent for long.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from dalsegno.health.check import Check
from dalsegno.health.checks.late import TIMEOUT_S, ask_twice
from dalsegno.health.node_reader import NodeReader
from dalsegno.health.result import SERVER_AWAY, Remedy, Result, failed, passed, warned
from dalsegno.system.hanging_calls import NoAnswer, TooLate

SHARED = re.compile(
    r"nfs4?|lustre|beegfs|gpfs|ceph|cifs|smb3|9p|wekafs|glusterfs"
    r"|fuse(?!\.(lxcfs|snapfuse|gvfsd-fuse|portal|squashfuse|fuse-overlayfs)$|ctl|blk)(\..+)?"
)
MAX_ASKED = 32
MAX_HANGING = 2  # after this many hanging file systems, the rest are skipped, because a prolog has no more time
SERVER_S = 0.6  # time limit for one server, so that a prolog has time for two
# How long a server must be silent before the check fails, and in how many checks in a row. Heavy I/O of one user can
# keep all threads of the server busy, so that it fails to answer any node for a moment. Users must not cause drains.
AWAY_S, AWAY_CHECKS = 30.0, 3
# How long a node may still hang after its server answers again. The kernel's client waits up to 5 minutes before it
# connects again, and the server then waits for its former clients.
RECONNECT_S = 600.0
NFS_PORT = 2049


class FsState(Enum):
    """The state of a shared file system."""

    ANSWERS = "answers"
    HANGS = "hangs"
    FAILS = "fails"
    NOT_MOUNTED = "not mounted"


class Outage(Enum):
    """How long the server of a file system did not answer, now or until recently."""

    NONE = "none"
    BRIEF = "brief"  # for less than AWAY_S so far: the server may only be overloaded
    LONG = "long"


@dataclass(frozen=True)
class FsAnswer:
    """The answer from a shared file system. `text` describes a problem; it is empty if there is none."""

    state: FsState
    text: str = ""
    outage: Outage = Outage.NONE


class Mount(NamedTuple):
    source: str
    target: str
    kind: str
    options: str


class NfsServer(NamedTuple):
    address: str
    port: int
    version: int


def _mounts(text: str) -> list[Mount]:
    """Parse /proc/mounts or fstab; blanks in a name are written `\\040`."""
    rows = [line.split() for line in text.splitlines() if line.strip()]
    return [Mount(row[0], row[1].replace("\\040", " "), row[2], row[3]) for row in rows]


def _is_shared(mount: Mount) -> bool:
    """Return whether a mount is checked. A mount that a user made is not: if it hangs, the node must not be drained."""
    users = mount.kind.startswith("fuse") and re.search(r"\buser_id=(?!0\b)", mount.options)
    return SHARED.fullmatch(mount.kind) is not None and not users


def ask_shared(node: NodeReader) -> Mapping[str, FsAnswer]:
    """Return the state of every shared file system that is mounted or should be.

    After some hanging file systems, the rest are not asked, and are missing from the result.
    """
    mounts = [mount for mount in _mounts(node.read("/proc/self/mounts")) if _is_shared(mount)]
    mounted = [mount.target for mount in mounts]
    wanted = [mount.target for mount in _mounts(_fstab(node)) if _is_shared(mount)]
    absent = FsAnswer(FsState.NOT_MOUNTED, "is not mounted")
    found = {target: absent for target in wanted if target not in mounted}
    hanging = 0
    servers: dict[NfsServer, bool] = {}
    once = {mount.source: mount for mount in reversed(mounts)}  # asked once, even if it is mounted in many places
    for mount in list(once.values())[:MAX_ASKED]:
        if hanging < MAX_HANGING:
            answer = _stat(node, mount.target)
            hanging += answer.state is FsState.HANGS
            if answer.state is FsState.ANSWERS:
                _end_silence(node, nfs_server(mount))
            else:
                answer = _blame(node, mount, answer, servers)
            found[mount.target] = answer
    return found


def _stat(node: NodeReader, target: str) -> FsAnswer:
    argv = ("stat", "--file-system", "--format=%T", target)
    try:
        done = ask_twice(node, lambda timeout_s: node.run(argv, timeout_s=timeout_s))
    except TooLate:
        return FsAnswer(FsState.HANGS, f"does not answer within {TIMEOUT_S:g} s")
    if done.exit_code == 0:
        return FsAnswer(FsState.ANSWERS)
    return FsAnswer(FsState.FAILS, done.stderr.strip() or done.stdout.strip() or "cannot be read")


def nfs_server(mount: Mount) -> NfsServer | None:
    """Return the server of an NFS mount; None if it cannot be asked over TCP."""
    options = dict(each.partition("=")[::2] for each in mount.options.split(","))
    if mount.kind not in ("nfs", "nfs4") or options.get("proto", "tcp") not in ("tcp", "tcp6") or "addr" not in options:
        return None
    port, version = options.get("port", ""), options.get("vers", "")[:1]
    return NfsServer(
        options["addr"],
        int(port) if port.isdecimal() and 0 < int(port) < 1 << 16 else NFS_PORT,
        int(version) if version.isdecimal() else 4,
    )


def _blame(node: NodeReader, mount: Mount, answer: FsAnswer, asked: dict[NfsServer, bool]) -> FsAnswer:
    """Return the answer of a faulty file system, completed by whether its server is the cause.

    Each server is asked only once in a check. `asked` holds the results.
    """
    server = nfs_server(mount)
    if server is None:
        return answer
    if server not in asked:
        asked[server] = node.nfs_answers(*server, timeout_s=SERVER_S)
        if asked[server]:
            _end_silence(node, server)
        else:
            _record_silence(node, server)
    if not asked[server]:
        text = f"{answer.text}: NFS server {server.address} does not answer"
        return replace(answer, text=text, outage=_outage(node, server))
    if (outage := _outage(node, server)) is not Outage.NONE:
        text = f"{answer.text}: NFS server {server.address} did not answer until recently"
        return replace(answer, text=text, outage=outage)
    return answer


def _record_silence(node: NodeReader, server: NfsServer) -> None:
    now, seen = node.now(), node.seen
    since, checks = seen.silences.get(server.address, (now, 0))
    seen.silences[server.address] = since, checks + 1
    seen.servers_silent[server.address] = now
    if now - since >= AWAY_S and checks + 1 >= AWAY_CHECKS:
        seen.servers_away[server.address] = now


def _end_silence(node: NodeReader, server: NfsServer | None) -> None:
    if server is not None:
        node.seen.silences.pop(server.address, None)


def _outage(node: NodeReader, server: NfsServer) -> Outage:
    """Return the longest outage of the server from which the node may not have recovered yet."""
    if 0 <= node.now() - node.seen.servers_away.get(server.address, -math.inf) < RECONNECT_S:
        return Outage.LONG
    silent = 0 <= node.now() - node.seen.servers_silent.get(server.address, -math.inf) < RECONNECT_S
    return Outage.BRIEF if silent else Outage.NONE


def _fstab(node: NodeReader) -> str:
    try:
        lines = node.read("/etc/fstab").splitlines()
    except NoAnswer:
        return ""
    return "\n".join(line for line in lines if not line.lstrip().startswith("#") and "noauto" not in line)


def judge_shared(answers: Mapping[str, FsAnswer]) -> Result:
    bad = {target: each for target, each in answers.items() if each.state is not FsState.ANSWERS}
    own = {target: each for target, each in bad.items() if each.outage is Outage.NONE}
    text = "; ".join([f"{target} {each.text}" for target, each in {**own, **bad}.items()][:4])
    if own:
        return failed(text, Remedy.REBOOT)
    if any(each.outage is Outage.LONG for each in bad.values()):
        return failed(text, Remedy.DRAIN, SERVER_AWAY)
    if bad:
        return warned(text, SERVER_AWAY)
    return passed(f"{len(answers)} shared file systems answer" if answers else "no shared file system is mounted")


SHARED_CHECKS = (
    Check(
        "file-systems", "shared file systems are mounted and answer", ask_shared, judge_shared, every_s=10, settle_s=5
    ),
)
