"""`dalsegno storage`: list the cluster's storage, and check it from every node."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

import click

from dalsegno.cli import out
from dalsegno.cli.elevation import elevate_to_change
from dalsegno.cli.out import cluster_option, json_option
from dalsegno.errors import DalsegnoError, NotThere, TargetError, UsageError
from dalsegno.hostlist import compress

if TYPE_CHECKING:
    from dalsegno.cluster import ClusterPlace
    from dalsegno.spec.facts import Cluster, Storage
    from dalsegno.storage.check import NodePrograms
    from dalsegno.storage.verdict import StorageReport
    from dalsegno.targets.base import Target

ANSWER_S = 60.0  # a node that takes longer is considered hung: a measurement takes at most 5 s
MAX_ANSWER = 1 << 20  # limit in bytes on the output of a node, because a node may be hostile
USER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")


@click.group()
def command() -> None:
    """List the storage of a cluster, and check it from every node."""


@command.command("ls", short_help="List storage: type, mount point and source.")
@cluster_option
@json_option
def list_(name: str | None, json_: bool) -> None:
    """List the storage in the cluster file: its type, mount point and source."""
    _, cluster = _open(name)
    if json_:
        out.as_json([asdict(each) for each in cluster.storage])
        return
    rows = [[each.name, each.type, each.mount, each.source or "-", _use(each)] for each in cluster.storage]
    out.table(["NAME", "TYPE", "MOUNT", "SOURCE", "USE"], rows)


def _use(storage: Storage) -> str:
    if storage.type == "scratch":
        return "a folder for each job" + (", required" if storage.required else "")
    return "home folders" if storage.home else "shared files"


@command.command("check", short_help="Check from every node whether storage is usable.")
@cluster_option
@click.argument("names", nargs=-1, metavar="[NAME|/PATH]…")
@click.option("--user", "-u", metavar="USER", help="Use the storage as this user. Default: the first of the cluster.")
@click.option("--quick", is_flag=True, help="Do not measure how fast it is.")
@json_option
def check(name: str | None, names: Sequence[str], user: str | None, quick: bool, json_: bool) -> None:
    """Check storage from every node: is it mounted, writable, the same everywhere, and fast enough?

    One node writes a file, and all others must find it, with the same inode number. Then each node writes up to 256 MB
    and creates up to 500 files, for a few seconds at most. Exits 1 if a storage failed. Warnings are not failures.

    With a path instead of a name, it checks what is mounted there on any Slurm cluster, as you, with a small job on
    each node that has room.

    \b
    dalsegno storage check
    dalsegno storage check fsx --user alice
    dalsegno storage check /shared
    """
    from dalsegno.storage.check import check_storage

    nodes = _nodes_with_paths(name, names, user) if any("/" in each for each in names) else _nodes(name, names, user)
    with out.progress() as say:
        reports = check_storage(nodes.storage, nodes.names, nodes.user, nodes.run, measure=not quick, say=say)
    ok = all(each.ok for each in reports)
    if json_:
        out.as_json({"ok": ok, "user": nodes.user, "storage": [_as_json(each) for each in reports]})
    else:
        _show(reports)
    if not ok:
        raise click.exceptions.Exit(1)


class CheckedNodes(NamedTuple):
    """The storage to check, the nodes to check it on, the user to check it as, and a function that runs a program on a
    node."""

    storage: Sequence[Storage]
    names: Sequence[str]
    user: str
    run: NodePrograms


def _nodes(name: str | None, names: Sequence[str], user: str | None) -> CheckedNodes:
    """Return the nodes of a cluster that Dal Segno created. Programs run on them as root."""
    from dalsegno.cluster import open_cluster

    place, cluster = _open(name)
    elevate_to_change(place)
    target = open_cluster(place)
    storage = _chosen(cluster, names)
    person = user or next((each.name for each in cluster.users), "") or _login_user(target)
    return CheckedNodes(storage, reachable_nodes(target, cluster), person, _programs_of(target))


def reachable_nodes(target: Target, cluster: Cluster) -> list[str]:
    """Return the nodes that can be asked, by their names in Slurm, which may differ from those in the cluster file.

    Leave out nodes that Slurm starts only for jobs. If Slurm does not answer, return the nodes of the cluster file.
    """
    try:
        found = target.slurm.nodes()
    except DalsegnoError as error:
        out.warn(f"Slurm does not answer, so the nodes of the cluster file are asked: {error.what.splitlines()[0]}")
        return [node.name for node in cluster.nodes]
    asleep = [node.name for node in found if node.powered_down or node.on_demand]
    if asleep:
        out.talk(f"not checked, because Slurm starts them only for jobs: {compress(asleep)}")
    names = [node.name for node in found if node.name not in asleep]
    if not names:
        raise NotThere("no node runs", hint="`sinfo` on the head shows the nodes; those on demand run while jobs do")
    return names


def _login_user(target: Target) -> str:
    """Return the user for the check when the cluster file names no user: the caller or, for a cluster on other
    machines, the login user of the head."""
    from dalsegno.system.files import user_of
    from dalsegno.system.hanging_calls import NoAnswer, ask, slowness
    from dalsegno.system.ownership import caller
    from dalsegno.targets.base import CanForward

    if not isinstance(target, CanForward):
        return user_of(caller())
    entry = target.on_head(["id", "-un"])
    try:
        done = ask(entry.argv, env=entry.env, timeout_s=ANSWER_S * slowness(), most_bytes=MAX_ANSWER)
    except NoAnswer as silence:
        raise DalsegnoError(f"no answer from the head: {silence}", hint="`dalsegno ssh` shows why") from silence
    name = done.checked().stdout.strip()
    if not USER_NAME.fullmatch(name):
        raise DalsegnoError("the head did not name its login user", hint="name a user of the cluster with `--user`")
    return name


def _nodes_with_paths(name: str | None, paths: Sequence[str], user: str | None) -> CheckedNodes:
    """Return the nodes of any Slurm cluster on which a small job of this user can start and check the storage."""
    from dalsegno.cli.containers.containers import slurm_here, steps_on
    from dalsegno.programs import launcher
    from dalsegno.spec.facts import Storage
    from dalsegno.system.files import user_of

    if user or not all(path.startswith("/") for path in paths):
        raise UsageError(
            "a path is checked with your own account, and not together with names of storage",
            hint="leave out `--user`, and give either names or absolute paths",
        )
    slurm, found = slurm_here(name)
    route = steps_on(slurm, found)
    names = [node.name for node in found if node.name not in route.closed]
    if closed := [node.name for node in found if node.name in route.closed]:
        out.talk(f"not checked, because a job would have to wait there: {compress(closed)}")
    if not names:
        raise NotThere("no node has room for a small job", hint="`sinfo` shows why; try again later")
    storage = [Storage(path, path.rstrip("/") or "/", type="existing") for path in paths]
    return CheckedNodes(storage, names, user_of(os.geteuid()), _runner(route.enter, launcher()))


def _open(name: str | None) -> tuple[ClusterPlace, Cluster]:
    """Return a cluster and its applied cluster file. Raise an error if the cluster is incomplete or has no storage."""
    from dalsegno.cluster import find_place
    from dalsegno.targets.folder import ClusterFolder, read_applied

    place = find_place(name)
    applied = read_applied(ClusterFolder(place.folder))
    if applied is None:
        raise TargetError(f"there is no complete cluster {place.name}", hint="`dalsegno up` creates it")
    if not applied.storage:
        raise NotThere(
            f"cluster {place.name} has no storage", hint="add `storage:` to the cluster file, then run `dalsegno up`"
        )
    return place, applied


def _chosen(cluster: Cluster, names: Sequence[str]) -> list[Storage]:
    known = {each.name: each for each in cluster.storage}
    if unknown := next((name for name in names if name not in known), None):
        raise NotThere(f"there is no storage `{unknown}`", hint=f"the cluster has {', '.join(known)}")
    return [known[name] for name in names] or list(known.values())


def _programs_of(target: Target) -> NodePrograms:
    from dalsegno.programs import HOST_LAUNCHER, launcher
    from dalsegno.targets.base import CanForward

    start = HOST_LAUNCHER if isinstance(target, CanForward) else launcher()

    def enter(node: str, words: Sequence[str]) -> tuple[Sequence[str], Mapping[str, str]]:
        entry = target.on_node(node, words, dict(os.environ), "/")
        return entry.argv, entry.env

    return _runner(enter, start)


def _runner(
    enter: Callable[[str, Sequence[str]], tuple[Sequence[str], Mapping[str, str]]], start: Sequence[str]
) -> NodePrograms:
    """Return a function that runs a helper program on a node. The function stops waiting for a node that hangs."""
    from dalsegno.system.hanging_calls import NoAnswer, ask, slowness

    def run(node: str, program: str, arguments: Sequence[str]) -> str:
        argv, env = enter(node, [*start, program, *arguments])
        try:
            return ask(argv, env=env, timeout_s=ANSWER_S * slowness(), most_bytes=MAX_ANSWER).checked().stdout
        except NoAnswer as silence:
            hint = "`dalsegno status` shows its state"
            raise DalsegnoError(f"no answer from {node}: {silence}", hint=hint) from silence

    return run


def _show(reports: Sequence[StorageReport]) -> None:
    rows = []
    for report in reports:
        answers = [answer for answer in report.answers.values() if answer]
        speeds = sorted(answer.mb_per_s for answer in answers if answer.mb_per_s)
        rates = sorted(answer.files_per_s for answer in answers if answer.files_per_s)
        slowest = f"{speeds[0]:.0f} MB/s" if speeds else "-"
        rows.append(
            [
                report.storage.name, report.storage.mount, compress(report.answers),
                f"{rates[0]:.0f} files/s" if rates else "-", slowest, "ok" if report.ok else "failed",
            ]
        )  # fmt: skip
    out.table(["NAME", "MOUNT", "NODES", "SLOWEST CREATE", "SLOWEST WRITE", "VERDICT"], rows)
    for finding in (each for report in reports for each in report.findings):
        (out.warn if finding.warning else out.error)(finding.sentence())
        out.advise(finding.hint)


def _as_json(report: StorageReport) -> dict[str, object]:
    return {
        "name": report.storage.name,
        "mount": report.storage.mount,
        "ok": report.ok,
        "nodes": {node: asdict(answer) if answer else None for node, answer in report.answers.items()},
        "findings": [
            {"fault": each.fault.value, "nodes": list(each.nodes), "text": each.text, "hint": each.hint,
             "warning": each.warning}
            for each in report.findings
        ],
    }  # fmt: skip
