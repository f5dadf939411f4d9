"""`dalsegno dashboards`: write dashboards for Grafana, and start Grafana on a machine of the cloud."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.interrupts import interruptible
from dalsegno.cli.measure.monitor import place_to_change, read_secret, running_monitor, write_for_caller, write_private
from dalsegno.cli.out import cluster_option
from dalsegno.errors import DalsegnoError

if TYPE_CHECKING:
    from dalsegno.cluster import ClusterPlace
    from dalsegno.spec.facts import RemoteWrite
    from dalsegno.targets.machines import CanHostGrafana


@click.group()
def command() -> None:
    """Write dashboards for Grafana, and start Grafana with them."""


@command.command(short_help="Write the dashboards, and start files for Grafana.")
@click.argument("folder", type=click.Path(file_okay=False), metavar="DIR")
@click.option("--prometheus", metavar="HOST:PORT", help="Prometheus to query. Default: the cluster's own.")
@cluster_option
def export(folder: str, prometheus: str | None, name: str | None) -> None:
    """Write the dashboards to DIR, and the files to start Grafana with these dashboards.

    \b
    dalsegno dashboards export grafana && docker compose -f grafana/compose.yml up
    """
    from dalsegno.observe.grafana import ADMIN_PASSWORD, PASSWORD, grafana_files, workspace_files

    if prometheus:
        files = grafana_files("any", prometheus, login=False)
    elif workspace := _workspace(name):
        files = workspace_files(place_to_change(name).name, workspace.url, workspace.region)
    else:
        _, layout = running_monitor(name)
        files = grafana_files(layout.cluster, layout.prometheus, login=True)
        write_private(Path(folder), {PASSWORD: read_secret(layout.password_file) + "\n"})
    _write_admin_password(Path(folder))
    _write_public(Path(folder), files)
    out.talk(f"{sum(path.startswith('dashboards/') for path in files)} dashboards are in {folder}/dashboards")
    if shutil.which("docker"):
        compose = quote(f"{folder}/compose.yml")
        out.advise(f"`docker compose -f {compose} up` starts Grafana with them, at http://127.0.0.1:3000")
        out.advise(f"log in as `admin`, with the password in {folder}/{ADMIN_PASSWORD}")


def _workspace(name: str | None) -> RemoteWrite | None:
    """Return the workspace that receives the cluster's metrics; None if its metrics stay on the cluster."""
    from dalsegno.cluster import open_cluster
    from dalsegno.targets.machines import CanExport

    target = open_cluster(place_to_change(name))
    return target.metrics_workspace() if isinstance(target, CanExport) else None


def _write_admin_password(folder: Path) -> None:
    """Write a password for Grafana's user `admin`, but keep that of an earlier export: Grafana sets it only at
    its first start."""
    from dalsegno.observe.grafana import ADMIN_PASSWORD
    from dalsegno.system.execute import as_caller

    def write() -> None:
        if not os.path.lexists(folder / ADMIN_PASSWORD):
            write_private(folder, {ADMIN_PASSWORD: secrets.token_urlsafe(16) + "\n"})

    as_caller(write)


def _write_public(folder: Path, files: Mapping[str, str]) -> None:
    """Write files without secrets, which Grafana's own user must be able to read."""
    write_for_caller(folder, files, 0o755, 0o644)


@command.command(short_help="Start Grafana on a machine of the cloud.")
@cluster_option
def deploy(name: str | None) -> None:
    """Start Grafana with the dashboards on an EC2 instance, for a cluster whose metrics go to Managed Prometheus.

    Its stack has the instance and a role. No port is open: the printed command forwards Grafana's port to this
    machine. Run it again after an update of Dal Segno, to get the new dashboards.
    """
    place = place_to_change(name)
    target = _host(place)
    with place.lock(), interruptible(), out.progress() as say:
        connect = target.start_grafana(say)
    out.talk(f"Grafana starts within minutes; `{connect}` forwards it to http://127.0.0.1:3000")


@command.command(short_help="Delete the machine with Grafana.")
@cluster_option
def remove(name: str | None) -> None:
    """Delete the stack that `dashboards deploy` created. The metrics are kept in the workspace."""
    place = place_to_change(name)
    target = _host(place)
    with place.lock(), interruptible(), out.progress() as say:
        found = target.stop_grafana(say)
    out.talk("Grafana and its machine are deleted" if found else "there is no machine with Grafana: nothing to delete")


def _host(place: ClusterPlace) -> CanHostGrafana:
    from dalsegno.cluster import may_change, open_cluster
    from dalsegno.targets.machines import CanHostGrafana

    target = open_cluster(place)
    if not isinstance(target, CanHostGrafana):
        raise DalsegnoError(
            f"target `{target.kind}` has no machine of its own for Grafana",
            hint="`dalsegno dashboards export DIR` writes a compose file, which starts Grafana on your machine",
        )
    may_change(place)
    return target
