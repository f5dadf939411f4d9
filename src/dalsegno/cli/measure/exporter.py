"""`dalsegno exporter`: serve the metrics of any Slurm cluster to Prometheus."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.interrupts import Interrupted, interruptible, stoppable
from dalsegno.cli.out import cluster_option
from dalsegno.errors import DalsegnoError, UsageError

if TYPE_CHECKING:
    from dalsegno.observe.collector import Collector

MIN_INTERVAL_S = 1.0


@click.command()
@cluster_option
@click.option(
    "--listen", default="127.0.0.1:9341", show_default=True, metavar="HOST:PORT", help="Address to serve /metrics at."
)
@click.option(
    "--compat",
    type=click.Choice(["vpenso", "sckyzo"]),
    default="vpenso",
    show_default=True,
    help="Exporter whose names the slurm_* metrics use: vpenso for dashboard 4323, sckyzo for HyperPod's dashboards.",
)
@click.option(
    "--interval", default="15s", show_default=True, metavar="TIME", help="Time between two queries of slurmctld."
)
@click.option(
    "--token-file", type=click.Path(path_type=Path), help="File with the bearer token; created if it does not exist."
)
@click.option("--open", "open_", is_flag=True, help="Serve without a token.")
@click.option("--once", is_flag=True, help="Collect once, print the metrics, and exit.")
def command(
    name: str | None, listen: str, compat: str, interval: str, token_file: Path | None, open_: bool, once: bool
) -> None:
    """Serve the metrics of a Slurm cluster to Prometheus. Dal Segno need not have created the cluster.

    \b
    dalsegno exporter --once
    dalsegno exporter --token-file /etc/dalsegno/metrics-token
    """
    collector = _collector(name, compat, _interval_s(interval))
    if once:
        _print_once(collector)
        return
    if open_ == (token_file is not None):
        raise UsageError(
            "name a token file, or allow everybody to read the metrics",
            hint="`--token-file FILE` (created if it does not exist), or `--open`",
        )
    _serve(collector, listen, token_file)


def _interval_s(text: str) -> float:
    interval_s = out.parse_time(text)
    if interval_s < MIN_INTERVAL_S:
        raise UsageError(f"the interval `{text}` is too short", hint="use 1s or more: every cycle queries slurmctld")
    return interval_s


def _collector(name: str | None, compat: str, interval_s: float) -> Collector:
    from dalsegno.cluster import find_slurm
    from dalsegno.observe.collector import Collector
    from dalsegno.observe.slurm_compat import SlurmDialect
    from dalsegno.observe.slurm_source import slurm_sources, slurm_status

    slurm, dialect = find_slurm(name), SlurmDialect(compat)
    if shutil.which("squeue", path=slurm.env.get("PATH")) is None:
        raise DalsegnoError(
            "Slurm's commands are not on the PATH", hint="install slurm-client, or use `--cluster NAME`"
        )
    return Collector([slurm_sources(slurm.client, dialect)], interval_s, status=slurm_status(dialect))


def _print_once(collector: Collector) -> None:
    """Print the metrics. If a source fails, print the metrics of the others, and the error."""
    import logging

    from dalsegno.cli.controller_requests import meaning_of
    from dalsegno.errors import CommandFailed
    from dalsegno.log import start_logging

    start_logging("exporter", level=logging.ERROR)
    with interruptible():
        collector.collect()
    failed = [one for one in collector.statuses() if one.fault]
    if len(failed) < len(collector.statuses()):
        click.echo(collector.text(), nl=False)
    fault = next((one.fault for one in failed), None)
    if fault:
        raise meaning_of(fault) if isinstance(fault, CommandFailed) else fault


def _serve(collector: Collector, listen: str, token_file: Path | None) -> None:
    import gc

    from dalsegno.log import start_logging
    from dalsegno.observe.http_server import HttpServer
    from dalsegno.observe.metrics_endpoint import ListenAddress, MetricsEndpoint, read_token

    address = ListenAddress.parse(listen)
    token = read_token(token_file) if token_file else None
    listener = address.open()
    address = ListenAddress(address.host, listener.getsockname()[1])  # if the port was 0, the kernel chose one
    server = HttpServer(listener, MetricsEndpoint(collector, token))
    start_logging("exporter")
    gc.set_threshold(200_000)  # with the default, garbage collection takes a third of the time for 100,000 jobs
    if token is None and not address.loopback:
        out.warn(f"everybody who can connect to {address} can read users, accounts and jobs")
    try:
        with stoppable():
            server.start()
            out.talk(f"serving http://{address}/metrics; Ctrl-C ends it")
            collector.start()
            never = threading.Event()
            while not never.wait(1.0):  # a signal that another thread receives does not end a wait without timeout
                pass
    except Interrupted:
        pass  # Ctrl-C is the usual way to end the server
    finally:
        server.close()
        collector.close()
