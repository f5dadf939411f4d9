"""`dalsegno plan`, `dalsegno up`: show what a cluster file changes, and create or change its cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.elevation import elevate_to_make
from dalsegno.cli.interrupts import interruptible
from dalsegno.cli.out import file_argument, json_option
from dalsegno.errors import DalsegnoError
from dalsegno.targets.base import CanManageUsers, CanMonitor, CanUpgrade, ClusterPhase, Plan, Say, Target, require

if TYPE_CHECKING:
    from dalsegno.cluster import ClusterPlace
    from dalsegno.spec.facts import Cluster


@click.command()
@file_argument
@json_option
@click.option("--write", "folder", metavar="FOLDER", help="Only write the files of a cloud's own tools to FOLDER.")
def plan(file: str, json_: bool, folder: str | None) -> None:
    """Show what `up` would do with FILE (default: cluster.yaml): what it adds, removes, restarts and waits for.

    For HyperPod and OCI, `--write` writes the requests, scripts, Terraform variables and IAM policies, without any
    query to the cloud.
    """
    cluster, _, target = _open(file)
    if folder is not None:
        _write_files(target, cluster, Path(folder))
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


def _write_files(target: Target, cluster: Cluster, folder: Path) -> None:
    from dalsegno.system.files import make_folder, write_atomic
    from dalsegno.targets.machines import CanRenderFiles

    if not isinstance(target, CanRenderFiles):
        raise DalsegnoError(
            f"target `{target.kind}` has no files of a platform", hint="leave `--write` out: `plan` shows the changes"
        )
    for name, text in target.platform_files(cluster).items():
        make_folder((folder / name).parent)
        write_atomic(folder / name, text)
        out.data(str(folder / name))


def _open(file: str) -> tuple[Cluster, ClusterPlace, Target]:
    """Read the cluster file and open its target, as root where it needs root.

    A user who may not change the cluster is refused, even for `plan`, because they cannot read all of its state.
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
def command(file: str, upgrade: bool) -> None:
    """Create the cluster in FILE (default: cluster.yaml), or apply changes in the file to a running cluster without
    disturbing its jobs. If `up` is interrupted, run it again: it continues from there.

    With --upgrade, hosts with another version of Dal Segno are updated one after the other. Runs and jobs continue.
    """
    from dalsegno.cli.cluster.user import end_sessions

    cluster, place, target = _open(file)
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


def _users_with_web_page(target: Target, place: ClusterPlace) -> dict[int, str]:
    """Return the users of the cluster by uid; none if no web page runs here, in which they could be logged in."""
    from dalsegno.web.login import SOCKET

    if not isinstance(target, CanManageUsers) or not (place.folder / SOCKET).exists():
        return {}
    view = target.people()
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
