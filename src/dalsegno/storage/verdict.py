"""Judge the nodes' answers about a storage: is it mounted, writable, the same everywhere, and fast enough? Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from dalsegno.hostlist import compress
from dalsegno.spec.facts import Storage
from dalsegno.storage.probe import ProbeAnswer

USUAL_MB_PER_S, USUAL_FILES_PER_S = 100, 100  # below these speeds, checkpoints and environments of small files are slow
LEAST_FREE_BYTES = 1 << 30


class StorageFault(Enum):
    """The kinds of faults that a storage can have on some nodes."""

    SILENT = "silent"  # the node did not answer in time, or its file system hangs
    MISSING = "missing"
    NOT_EXPORTED = "not exported"
    NOT_MOUNTED = "not mounted"
    READ_ONLY = "read-only"
    NOT_WRITABLE = "not writable"
    OTHER_FILES = "other files"  # the node has another file system under the same path
    SLOW = "slow"
    FULL = "full"


@dataclass(frozen=True)
class StorageFinding:
    """A fault of a storage, the nodes that have it, and what to do. A warning does not fail the check."""

    storage: str
    fault: StorageFault
    nodes: tuple[str, ...]
    text: str
    hint: str
    warning: bool = False

    def sentence(self) -> str:
        return f"{self.storage} on {compress(self.nodes)}: {self.text}"


@dataclass(frozen=True)
class StorageReport:
    """The result of checking one storage: the findings, and the answer of each node; None if the node did not
    answer."""

    storage: Storage
    answers: Mapping[str, ProbeAnswer | None]
    findings: tuple[StorageFinding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.warning for finding in self.findings)


def judge_storage(storage: Storage, answers: Mapping[str, ProbeAnswer | None], user: str) -> StorageReport:
    """Judge the answers of all nodes. Each node is listed only under its first fault, because later faults follow from
    it. Only nodes without such a fault are checked for speed and free space."""
    left = dict(answers)
    found: list[StorageFinding] = []
    for fault in (_silent, _missing, _not_exported, _not_mounted, _read_only, _not_writable, _other_files):
        new = list(fault(storage, left, user))
        found += new
        left = {node: answer for node, answer in left.items() if all(node not in each.nodes for each in new)}
    known = {node: answer for node, answer in left.items() if answer is not None}
    return StorageReport(storage, answers, tuple([*found, *_slow(storage, known), *_full(storage, known)]))


Answers = Mapping[str, ProbeAnswer | None]


def _silent(storage: Storage, answers: Answers, user: str) -> Iterable[StorageFinding]:
    if nodes := [node for node, answer in answers.items() if answer is None]:
        text = f"no answer from {storage.mount} in time, or the node is off"
        hint = f"`dalsegno status` shows whether the node is on; there, `stat {storage.mount}` shows whether it hangs"
        yield StorageFinding(storage.name, StorageFault.SILENT, tuple(nodes), text, hint)


def _missing(storage: Storage, answers: Answers, user: str) -> Iterable[StorageFinding]:
    if nodes := [node for node, answer in answers.items() if answer and not answer.fstype]:
        hint = "run `dalsegno up` again" if storage.type != "existing" else "mount it there, then check again"
        yield StorageFinding(
            storage.name, StorageFault.MISSING, tuple(nodes), f"there is no folder {storage.mount}", hint
        )


def _not_exported(storage: Storage, answers: Answers, user: str) -> Iterable[StorageFinding]:
    """Find nodes whose NFS server does not export the folder.

    The server of a stale mount is taken from the mount, because the cluster file names none for `existing` storage.
    """
    groups: dict[tuple[str, bool], list[str]] = {}
    for node, answer in answers.items():
        if answer and answer.not_exported:
            stale = answer.fstype.startswith("nfs")
            groups.setdefault((answer.source if stale else storage.source, stale), []).append(node)
    for (source, stale), nodes in groups.items():
        server, _, folder = source.partition(":")
        text = f"nothing is mounted at {storage.mount}: server {server} does not export {folder}"
        if stale:
            text = f"the mount at {storage.mount} is stale: server {server} no longer exports {folder}"
        hint = f"add {folder} to /etc/exports of {server}, then run `exportfs -ra` there"
        yield StorageFinding(storage.name, StorageFault.NOT_EXPORTED, tuple(nodes), text, hint)


def _not_mounted(storage: Storage, answers: Answers, user: str) -> Iterable[StorageFinding]:
    """Find nodes on which the path is a plain folder. Storage of type `existing` may be a folder inside a mount."""
    if storage.type == "scratch":
        return
    strict = storage.type != "existing"
    nodes = [
        node
        for node, answer in answers.items()
        if answer and answer.mount_point and (not answer.mounted if strict else answer.mount_point == "/")
    ]
    if nodes:
        text = f"{storage.mount} is an ordinary folder of the node, nothing is mounted there"
        hint = "run `dalsegno up` again" if strict else "mount it on these nodes, for example with /etc/fstab"
        yield StorageFinding(storage.name, StorageFault.NOT_MOUNTED, tuple(nodes), text, hint)


def _read_only(storage: Storage, answers: Answers, user: str) -> Iterable[StorageFinding]:
    if nodes := [node for node, answer in answers.items() if answer and answer.read_only]:
        text = f"{storage.mount} is mounted read-only"
        hint = "the kernel does this after disk errors: check `dmesg` there, then mount it again with `rw`"
        yield StorageFinding(storage.name, StorageFault.READ_ONLY, tuple(nodes), text, hint)


def _not_writable(storage: Storage, answers: Answers, user: str) -> Iterable[StorageFinding]:
    groups: dict[str, list[str]] = {}
    for node, answer in answers.items():
        if answer and answer.error:
            groups.setdefault(answer.error, []).append(node)
    for error, nodes in groups.items():
        text = f"{user} cannot write to {storage.mount}: {error}"
        hint = f"give {user} a folder in it, or write access to all: `chmod 1777 {storage.mount}`"
        yield StorageFinding(storage.name, StorageFault.NOT_WRITABLE, tuple(nodes), text, hint)


def _other_files(storage: Storage, answers: Answers, user: str) -> Iterable[StorageFinding]:
    """Find nodes that do not see the writer's token, or see another file in its place. The inode number that most nodes
    see counts as correct."""
    if storage.type == "scratch":
        return
    seen = {node: answer.inode if answer.token else 0 for node, answer in answers.items() if answer}
    most = Counter(inode for inode in seen.values() if inode).most_common(1)
    if nodes := [node for node, inode in seen.items() if not most or inode != most[0][0]]:
        kinds = sorted({f"{answer.fstype} from {answer.source}" for node in nodes if (answer := answers[node])})
        text = f"a file written on one node is not there: {storage.mount} is another file system ({', '.join(kinds)})"
        hint = f"compare `findmnt {storage.mount}` there and on another node, and mount the same source"
        yield StorageFinding(storage.name, StorageFault.OTHER_FILES, tuple(nodes), text, hint)


def _slow(storage: Storage, answers: Mapping[str, ProbeAnswer]) -> Iterable[StorageFinding]:
    """Find slow nodes. A speed below the limit in the cluster file fails the check. If the file has no limit, a speed
    below the usual one is a warning."""
    rates = (
        ("writes", "MB/s", storage.min_mb_per_s, USUAL_MB_PER_S, {n: a.mb_per_s for n, a in answers.items()}),
        (
            "creates and removes", "files/s", storage.min_files_per_s, USUAL_FILES_PER_S,
            {n: a.files_per_s for n, a in answers.items()},
        ),
    )  # fmt: skip
    for verb, unit, limit, usual, values in rates:
        least = usual if limit is None else limit
        measured = {node: value for node, value in values.items() if value}
        if nodes := [node for node, value in measured.items() if value < least]:
            worst = min(measured.values())
            text = f"{verb} {worst:.0f} {unit}, less than {least} ({'usual' if limit is None else 'the cluster file'})"
            hint = "look for other load on the server and the network; the limits are `min_mb_per_s` and "
            hint += "`min_files_per_s` of the storage in the cluster file"
            yield StorageFinding(storage.name, StorageFault.SLOW, tuple(nodes), text, hint, warning=limit is None)


def _full(storage: Storage, answers: Mapping[str, ProbeAnswer]) -> Iterable[StorageFinding]:
    if nodes := [node for node, answer in answers.items() if answer.free_bytes < LEAST_FREE_BYTES]:
        free = min(answers[node].free_bytes for node in nodes)
        text = f"only {free / 1e6:.0f} MB are free"
        yield StorageFinding(storage.name, StorageFault.FULL, tuple(nodes), text, "remove files", warning=True)
