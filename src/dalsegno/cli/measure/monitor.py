"""`dalsegno monitor`: run Prometheus for a cluster, show what it scrapes and its alerts, and explain panels without
data."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.elevation import elevate_to_change
from dalsegno.cli.interrupts import interruptible
from dalsegno.cli.out import cluster_option, json_option
from dalsegno.errors import DalsegnoError

if TYPE_CHECKING:
    from dalsegno.cluster import ClusterPlace
    from dalsegno.observe.missing_data import MissingMetric
    from dalsegno.observe.monitor_layout import MonitorLayout
    from dalsegno.observe.prometheus_client import FiringAlert, PrometheusClient, ScrapeHealth
    from dalsegno.observe.remote_write import RemoteWriteHealth
    from dalsegno.targets.base import CanMonitor, Say

READY_S = 60.0
SHOWN = 3


@click.group()
def command() -> None:
    """Run Prometheus, Alertmanager and node_exporter for a cluster, and query them."""


@command.command()
@cluster_option
def up(name: str | None) -> None:
    """Start Prometheus, Alertmanager and node_exporter for the cluster.

    They run until `monitor down`. To start them with the cluster, set `prometheus: true` below `monitoring:` in the
    cluster file.
    """
    if _switch_exporters(name, on=True):
        return
    layout = _switch(name, on=True)
    out.talk(f"Prometheus is at http://{layout.prometheus}, Alertmanager at http://{layout.alertmanager}")
    out.talk(f"user `dalsegno`, password in {layout.password_file}; `dalsegno monitor status` shows all targets")


@command.command()
@cluster_option
def down(name: str | None) -> None:
    """Stop Prometheus, Alertmanager and node_exporter. Recorded metrics are kept until `dalsegno down`."""
    if not _switch_exporters(name, on=False):
        _switch(name, on=False)


def _switch_exporters(name: str | None, *, on: bool) -> bool:
    """Start or stop the exporters and Prometheus of a target that runs them on its own machines (`CanExport`). Return
    False for any other target."""
    from dalsegno.cluster import may_change, open_cluster
    from dalsegno.targets.machines import CanExport

    place = place_to_change(name)
    target = open_cluster(place)
    if not isinstance(target, CanExport):
        return False
    may_change(place)
    with place.lock(), interruptible(), out.progress() as say:
        plan = target.switch_exporters(on, say)
        for line in plan.sentences():
            out.talk(line)
        target.apply(plan, say)
    if on:
        found = target.metrics_workspace()
        out.talk(f"metrics go to {found.url if found else 'no workspace'}")
        out.talk(f"if the instances may not write there yet: `{target.metrics_permission()}`")
        out.talk("`dalsegno monitor status` shows exporters and the workspace, once the instances are set up")
        out.talk("`dalsegno dashboards deploy` starts Grafana on AWS; `dashboards export DIR` is for your machine")
    return True


def _switch(name: str | None, *, on: bool) -> MonitorLayout:
    """Start or stop Prometheus, Alertmanager and node_exporter."""
    from dalsegno.cluster import may_change, open_cluster
    from dalsegno.targets.base import CanForward, CanMonitor, require

    place = place_to_change(name)
    may_change(place)
    target = open_cluster(place)
    able = require(target, CanMonitor)
    with place.lock(), interruptible(), out.progress() as say:
        plan = able.switch_monitor(on)
        for line in [f"Prometheus {'runs' if on else 'is off'} already"] if plan.empty else plan.sentences():
            out.talk(line)
        if not plan.empty:
            target.apply(plan, say)
        layout = able.monitor_layout()
        # Wait only if Prometheus runs on this machine: the ports of other machines may be closed to this one.
        if on and not isinstance(target, CanForward):
            say("waiting for Prometheus")
            _wait_until_ready(_client(layout))
    if not (on or plan.empty):
        out.talk("Prometheus is off; `dalsegno monitor up` starts it again, with the metrics recorded so far")
    return layout


def place_to_change(name: str | None) -> ClusterPlace:
    from dalsegno.cluster import find_place

    place = find_place(name)
    elevate_to_change(place)
    return place


def _wait_until_ready(client: PrometheusClient) -> None:
    """Wait until Prometheus has loaded its old data and found its targets, which takes about five seconds."""
    until = time.monotonic() + READY_S
    while not (client.ready() and client.targets()):
        if time.monotonic() > until:
            raise DalsegnoError(
                f"Prometheus does not answer after {READY_S:.0f} s",
                hint="`dalsegno logs --daemon prometheus` shows its log",
            )
        time.sleep(0.1)


def _client(layout: MonitorLayout) -> PrometheusClient:
    from dalsegno.observe.prometheus_client import PrometheusClient

    return PrometheusClient(layout.prometheus, read_secret(layout.password_file) if layout.password_file else "")


def read_secret(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except FileNotFoundError:
        raise DalsegnoError("Prometheus does not run on this cluster", hint="`dalsegno monitor up` starts it") from None
    except PermissionError:
        raise DalsegnoError(f"only the cluster's owner may read {path}", hint="use sudo") from None


def running_monitor(name: str | None) -> tuple[CanMonitor, MonitorLayout]:
    """Return the target and its layout. Raise DalsegnoError if the cluster has no Prometheus."""
    from dalsegno.cluster import open_cluster
    from dalsegno.observe.monitor_layout import ENABLE
    from dalsegno.targets.base import CanMonitor, require

    target = require(open_cluster(place_to_change(name)), CanMonitor)
    layout = target.monitor_layout()
    if not target.has_monitor():
        hint = "`dalsegno monitor up` starts it" if layout.settings.enabled else ENABLE
        raise DalsegnoError("Prometheus does not run on this cluster", hint=hint)
    return target, layout


@command.command(short_help="Show the targets of Prometheus, and firing alerts.")
@cluster_option
@json_option
def status(name: str | None, json_: bool) -> None:
    """Show the health of everything that Prometheus reads, the server that it writes to, and the firing alerts.

    Exits 1 if a target does not answer, if metrics do not arrive at the server, or if Prometheus has just started and
    has no targets yet.
    """
    from dalsegno.observe.prometheus_client import ScrapeState
    from dalsegno.observe.remote_write import WriteState, read_writes
    from dalsegno.spec.facts import facts_to_json

    _, layout = running_monitor(name)
    client = _client(layout)
    targets = sorted(client.targets(), key=lambda each: (each.job, each.host))
    alerts = sorted(client.alerts(), key=lambda each: (each.severity, each.name))
    to = layout.settings.remote_write
    writes = [read_writes(client, to.url, time.time())] if to else []
    if json_:
        addresses = {"prometheus": layout.prometheus, "alertmanager": layout.alertmanager}
        found = {
            "targets": [facts_to_json(each) for each in targets],
            "remote_write": [facts_to_json(each) for each in writes],
            "alerts": [facts_to_json(each) for each in alerts],
        }
        out.as_json({**addresses, **found})
    else:
        show_status(layout, targets, alerts, writes)
    down = any(each.state is ScrapeState.DOWN for each in targets)
    raise SystemExit(1 if down or not targets or any(each.state is WriteState.FAILING for each in writes) else 0)


def show_status(
    layout: MonitorLayout,
    targets: list[ScrapeHealth],
    alerts: list[FiringAlert],
    writes: Sequence[RemoteWriteHealth] = (),
) -> None:
    """Print Prometheus's targets, the server that it writes to, and alerts. Just after a start, only say that there are
    no targets yet."""
    from dalsegno.observe.prometheus_client import ScrapeState
    from dalsegno.observe.remote_write import WriteState

    alertmanager = f", Alertmanager http://{layout.alertmanager}" if layout.alertmanager else ""
    out.talk(f"Prometheus http://{layout.prometheus}{alertmanager}")
    if not targets:
        out.warn("Prometheus has just started and has no targets yet: try again in a few seconds")
        return
    rows = [[each.job, each.host, each.address, each.state.value, each.error] for each in targets]
    out.table(["JOB", "INSTANCE", "ADDRESS", "STATE", "ERROR"], rows)
    if writes:
        out.data("")
        rows = [[each.url, each.state.value, str(each.sent), each.why] for each in writes]
        out.table(["REMOTE WRITE", "STATE", "SAMPLES IN 5 MIN", "ERROR"], rows)
    if any(each.state is WriteState.FAILING for each in writes):
        out.advise("`dalsegno logs --daemon prometheus` shows what the server answers")
    if alerts:
        out.data("")
        out.table(["ALERT", "SEVERITY", "SUMMARY"], [[each.name, each.severity, each.summary] for each in alerts])
    elif unknown := sum(each.state is ScrapeState.UNKNOWN for each in targets):
        out.warn(f"{unknown} of {len(targets)} targets were not read yet, so alerts may be missing")
    else:
        out.talk("no alert fires")


@command.command(short_help="Show which source each empty panel lacks.")
@cluster_option
@json_option
def check(name: str | None, json_: bool) -> None:
    """Show which exporter or source should provide the data of each empty dashboard panel.

    Exits 1 if an exporter or source fails. A source that has nothing to report, such as EFA on a cluster without it,
    is not a failure.
    """
    from dalsegno.observe.missing_data import OriginState
    from dalsegno.spec.facts import facts_to_json

    _, layout = running_monitor(name)
    client = _client(layout)
    with interruptible(), out.progress() as say:
        _wait_for_scrapes(client, layout.settings.interval_s, say)
    found = find_missing(client)
    failing = [each for each in found if each.state is OriginState.FAILING]
    if json_:
        out.as_json([facts_to_json(each) for each in found])
    elif not found:
        out.talk("every panel has data")
    else:
        groups = dict.fromkeys((each.origin, each.state, each.why) for each in found)
        for group in groups:
            out.data(describe_missing([each for each in found if (each.origin, each.state, each.why) == group]))
    raise SystemExit(1 if failing else 0)


def _wait_for_scrapes(client: PrometheusClient, interval_s: float, say: Say) -> None:
    """Wait up to two scrape intervals for the first scrape of all targets: a new target must not count as failing."""
    from dalsegno.observe.prometheus_client import ScrapeState

    until = time.monotonic() + 2 * interval_s
    while any(each.state is ScrapeState.UNKNOWN for each in client.targets()) and time.monotonic() < until:
        say("waiting for the first scrape of all targets")
        time.sleep(1.0)


def find_missing(client: PrometheusClient) -> list[MissingMetric]:
    """Return the metrics of our dashboards that Prometheus does not have, and why."""
    from dalsegno.observe.dashboards import DASHBOARDS
    from dalsegno.observe.missing_data import explain_missing, panels_by_metric

    names = "|".join(panels_by_metric(DASHBOARDS))
    counted = client.query(f'count by (__name__) ({{__name__=~"{names}"}})')
    present = {sample.labels.get("__name__", "") for sample in counted}
    success = client.query("dalsegno_collector_success")
    collected = {sample.labels.get("source", ""): sample.value == 1 for sample in success}
    agents = {sample.labels.get("instance", "") for sample in client.query("dalsegno_node_metrics_timestamp_seconds")}
    return explain_missing(DASHBOARDS, present, client.targets(), collected, agents)


def describe_missing(missing: Sequence[MissingMetric], columns: int | None = None) -> str:
    """Return a block of lines about metrics that are missing for the same reason."""
    import textwrap

    first = missing[0]
    panels = list(dict.fromkeys(panel for each in missing for panel in each.panels))
    parts = {"why": first.why, "metrics": _few([each.name for each in missing]), "panels": _few(panels)}
    width = columns or out.columns()
    wrapped = [
        textwrap.fill(
            f"  {name + ':':<9}{text}",
            width,
            subsequent_indent=" " * 11,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, text in parts.items()
    ]
    return "\n".join([f"{first.origin.value}: {first.state.value}", *wrapped])


def _few(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


@command.command(short_help="Write files for a Prometheus of your own to DIR.")
@click.argument("folder", type=click.Path(file_okay=False), metavar="DIR")
@cluster_option
def config(folder: str, name: str | None) -> None:
    """Write the configuration for a Prometheus and an Alertmanager of your own to DIR.

    The files have the scrapes, rules, alerts and receivers of the cluster. The secrets for the scrapes are written with
    mode 0600. With `remote_write` in the cluster file, the IAM policy is written too.
    """
    from dataclasses import replace

    from dalsegno.cluster import may_change, open_cluster
    from dalsegno.observe.alertmanager import with_webhook_urls
    from dalsegno.observe.monitor_layout import ENABLE
    from dalsegno.observe.prometheus import monitor_files
    from dalsegno.targets.base import CanMonitor, require

    place = place_to_change(name)
    may_change(place)  # raises for users without rights: the files hold secrets of the cluster
    able = require(open_cluster(place), CanMonitor)
    layout = able.monitor_layout()
    if not layout.exporter_password_file:
        raise DalsegnoError(
            "the exporters of this cluster can be read only on its own machines",
            hint=f"Prometheus on the head has its configuration in {place.folder}/prometheus",
        )
    settings = with_webhook_urls(layout.settings)
    own = replace(
        layout, token_file="secrets/metrics-token", password_file="secrets/password",
        exporter_password_file="secrets/exporter-password", settings=settings,
    )  # fmt: skip
    files = monitor_files(own, "dalsegno monitor config")
    for name in ("token_file", "password_file", "exporter_password_file"):
        source, copy = getattr(layout, name), getattr(own, name)
        if Path(source).exists():
            files[copy] = read_secret(source) + "\n"
    write_private(Path(folder), files)
    if not settings.enabled:
        out.warn("monitoring of this cluster is turned off: only node_exporters that you start yourself have metrics")
        out.advise(ENABLE)
    elif not able.has_monitor():
        out.warn("node_exporter does not run on the nodes: `dalsegno monitor up` starts it, with a Prometheus")
    path = f"{folder}/prometheus.yml"
    out.talk(f"{path} is ready: `prometheus --config.file={quote(path)}`")


def write_private(folder: Path, files: Mapping[str, str]) -> None:
    """Write files that only the caller can read, because they may contain secrets."""
    write_for_caller(folder, files, 0o700, 0o600)


def write_for_caller(folder: Path, files: Mapping[str, str], folder_mode: int, mode: int) -> None:
    """Write files with the rights of the calling user, even under sudo: root never follows links in folders of
    users."""
    from dalsegno.system.execute import as_caller
    from dalsegno.system.files import make_folder, write_atomic

    def write() -> None:
        above = {each for path in files for each in (folder / path).parents}
        missing = sorted(each for each in above if not os.path.lexists(each))
        try:
            for path, text in files.items():
                make_folder((folder / path).parent, folder_mode)
                write_atomic(folder / path, text, mode)
        except DalsegnoError:
            for each in reversed(missing):
                with contextlib.suppress(OSError):  # the folder is not empty, or was never created
                    each.rmdir()
            raise

    as_caller(write)
