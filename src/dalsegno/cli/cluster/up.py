"""`dalsegno plan`, `dalsegno up`: show what a cluster file changes, and create or change its cluster."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.elevation import elevate_to_make
from dalsegno.cli.interrupts import interruptible
from dalsegno.cli.out import file_argument, json_option
from dalsegno.errors import DalsegnoError, NotThere, TargetError, UsageError
from dalsegno.targets.base import CanManageUsers, CanMonitor, CanUpgrade, ClusterPhase, Plan, Say, Target, require

if TYPE_CHECKING:
    from dalsegno.cluster import ClusterPlace
    from dalsegno.spec.facts import Cluster

WRITTEN = ".dalsegno-files"  # the file with the names of the files that `plan --write` wrote to a folder


@click.command()
@file_argument
@json_option
@click.option("--write", "folder", metavar="FOLDER", help="Only write the files of a cloud's own tools to FOLDER.")
def plan(file: str, json_: bool, folder: str | None) -> None:
    """Show what `up` would do with FILE (default: cluster.yaml): what it adds, removes, restarts and waits for.

    For clouds, `--write` writes the files of their own tools without any query to the cloud: cluster.yaml and the
    CloudFormation template (ParallelCluster), requests (HyperPod), Terraform variables and IAM policies (OCI), and the
    scripts of machines. In a folder that it wrote to before, it replaces its own files and no others.
    """
    cluster, _, target = _open(file)
    if folder is not None:
        written = _write_files(target, cluster, Path(folder))
        if json_:
            out.as_json({"cluster": cluster.name, "target": cluster.target, "files": written})
        else:
            for path in written:
                out.data(path)
        return
    plan = target.plan(cluster)
    consequences = [*plan.sentences(), *plan.details()]
    if json_:
        out.as_json(
            {
                "cluster": cluster.name,
                "target": cluster.target,
                "changes": not plan.empty,
                "consequences": consequences,
            }
        )
    else:
        for line in consequences:
            out.data(line)


def _write_files(target: Target, cluster: Cluster, folder: Path) -> list[str]:
    """Write the files of the cloud's own tools to the folder, and return their paths."""
    from dalsegno.system.files import make_folder, write_atomic
    from dalsegno.targets.machines import CanRenderFiles

    if not isinstance(target, CanRenderFiles):
        raise DalsegnoError(
            f"target `{target.kind}` has no files for `--write`",
            hint="use `dalsegno plan` without `--write` to see the changes",
        )
    files = target.platform_files(cluster)
    written_before = _read_written(folder)
    if foreign := [name for name in files if name not in written_before and os.path.lexists(folder / name)]:
        raise DalsegnoError(
            f"{folder / foreign[0]} exists, and `plan --write` did not write it",
            hint="name a folder that does not exist yet, such as `--write files`",
        )
    make_folder(folder)
    write_atomic(folder / WRITTEN, "".join(f"{name}\n" for name in sorted({*files, *written_before})))
    for name in written_before - files.keys():
        if (folder / name).parent.resolve().is_relative_to(folder.resolve()):
            (folder / name).unlink(missing_ok=True)
    for name, text in files.items():
        make_folder((folder / name).parent)
        write_atomic(folder / name, text)
    write_atomic(folder / WRITTEN, "".join(f"{name}\n" for name in sorted(files)))
    return [str(folder / name) for name in files]


def _read_written(folder: Path) -> set[str]:
    """Return the names of the files that an earlier `plan --write` wrote to the folder.

    Root trusts no list that another user can change, because the files in it are replaced and removed.
    """
    try:
        if os.geteuid() == 0 and not all(_only_root_writes(path) for path in (folder, folder / WRITTEN)):
            return set()
        names = (folder / WRITTEN).read_text().splitlines()
    except (OSError, ValueError):
        return set()
    return {name for name in names if name and not Path(name).is_absolute() and ".." not in Path(name).parts}


def _only_root_writes(path: Path) -> bool:
    status = path.lstat()
    return status.st_uid == 0 and not stat.S_ISLNK(status.st_mode) and not status.st_mode & 0o022


def _open(file: str) -> tuple[Cluster, ClusterPlace, Target]:
    """Read the cluster file, and return the cluster, its place and its target. If the target needs root, continue as
    root.

    Users who may not change the cluster are refused, even for `plan`, because they cannot read all of its state.
    """
    from dalsegno.cluster import may_change, open_target, place_named
    from dalsegno.spec.load import load_spec
    from dalsegno.spec.resolve import resolve

    cluster = resolve(load_spec(Path(file)))
    place = place_named(cluster.name)
    target = open_target(cluster.target, place)
    elevate_to_make(place, cluster, target)
    may_change(place)
    return cluster, place, target


@click.command()
@file_argument
@click.option("--upgrade", is_flag=True, help="Update Dal Segno on the hosts of an ssh cluster to the version here.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask before Terraform destroys something (OCI).")
def command(file: str, upgrade: bool, yes: bool) -> None:
    """Create the cluster in FILE (default: cluster.yaml), or apply changes in the file to a running cluster without
    disturbing its jobs. If `up` is interrupted, run it again: it continues from there.

    With --upgrade, hosts with another version of Dal Segno are updated one after the other. Runs and jobs continue.
    """
    from dalsegno.cli.cluster.user import end_sessions

    cluster, place, target = _open(file)
    let_ask(target, cluster.name, yes)
    started = time.monotonic()
    with place.lock(), interruptible(), out.progress() as say:
        plan = require(target, CanUpgrade).plan_upgrade(cluster) if upgrade else target.plan(cluster)
        for line in plan.sentences():
            out.talk(line)
        if not plan.empty:
            before = _users_with_web_page(target, place)
            _apply(target, plan, say, cluster.name)
            for uid in before.keys() - _users_with_web_page(target, place).keys():
                end_sessions(place.folder, uid)
    if plan.import_images:  # import without the lock: the cluster is up, and the controller may have to repair nodes
        with interruptible(), out.progress() as say:
            target.import_images(plan, say)
    if not plan.empty:
        out.talk(f"{cluster.name} is up after {time.monotonic() - started:.1f} s; try `dalsegno shell -- sinfo`")
        _name_prometheus(target)


def let_ask(target: Target, name: str, yes: bool) -> None:
    """Allow the target to ask the user for confirmation. Some targets learn only in `apply` what they will destroy."""
    from dalsegno.targets.machines import AsksWhileApplying

    if isinstance(target, AsksWhileApplying):
        target.confirm = lambda lines, destroys: _confirm(name, lines, ask=destroys and not yes)


def _confirm(name: str, consequences: Sequence[str], *, ask: bool) -> bool:
    """Show what the cloud's own plan changes, and return whether to go on. With `ask`, ask the user; a script must pass
    `--yes` instead."""
    terminal = sys.stdin.isatty() and sys.stderr.isatty()
    if sys.stderr.isatty():
        out.replace_line("")
    for line in consequences:
        out.talk(line)
    if ask and not terminal:
        raise UsageError(f"`up` would destroy parts of {name}", hint="add `--yes` to do it")
    return not ask or click.confirm(f"change {name}?", err=True)


def _users_with_web_page(target: Target, place: ClusterPlace) -> dict[int, str]:
    """Return the users who may be logged in to the web page, by uid; empty if no web page runs on this machine."""
    from dalsegno.web.login import SOCKET

    if not isinstance(target, CanManageUsers) or not (place.folder / SOCKET).exists():
        return {}
    try:
        view = target.people()
    except (TargetError, NotThere):
        return {}  # an earlier `up` was interrupted before it had applied the cluster file
    return {view.uids[user.name]: user.name for user in view.cluster.users if user.name in view.uids}


def _name_prometheus(target: Target) -> None:
    if isinstance(target, CanMonitor) and target.has_monitor():
        out.talk(f"Prometheus is at http://{target.monitor_layout().prometheus}; `dalsegno monitor status` shows it")


def _apply(target: Target, plan: Plan, say: Say, name: str) -> None:
    try:
        target.apply(plan, say)
    except KeyboardInterrupt:
        out.talk("")
        _report_phase(target, name)
        raise
    except DalsegnoError:
        _report_phase(target, name)
        raise


def _report_phase(target: Target, name: str) -> None:
    phase = target.summary().phase
    if phase is ClusterPhase.HALF_MADE:
        out.talk(f"{name} is half-made: `dalsegno up` continues from here, `dalsegno down {name}` removes it")
    elif phase is ClusterPhase.CHANGING:
        out.talk(f"{name} is partly changed: `dalsegno up` continues from here")
