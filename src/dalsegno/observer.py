"""The program `observer`: serve the metrics and the web page of the cluster in a state folder.

It is a process of its own, so that neither a scrape nor a browser delays recovery. It may be killed at any time, and
it waits for a controller and for a slurmctld that do not answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from functools import cache
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.log import start_logging
from dalsegno.observe.collector import Collector
from dalsegno.observe.http_server import HttpServer
from dalsegno.observe.metrics_endpoint import ListenAddress, MetricsEndpoint, read_token
from dalsegno.observe.slurm_compat import SlurmDialect
from dalsegno.observe.slurm_source import slurm_sources, slurm_status
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster
from dalsegno.system.files import locked, make_folder
from dalsegno.system.processes import LocalRunner
from dalsegno.targets.base import Target
from dalsegno.targets.folder import ClusterFolder, read_applied
from dalsegno.web.actions import ActionRunner
from dalsegno.web.app import WebApp, WebSite
from dalsegno.web.data import ClusterData
from dalsegno.web.live import LivePicture
from dalsegno.web.login import LoginServer
from dalsegno.web.sessions import Sessions
from dalsegno.web.sources import LiveSources

log = logging.getLogger("observer")

SLURM_S = 15.0
SESSIONS, TOKEN, LOCK = "secret/web-sessions.json", "secret/metrics-token", "secret/observer.lock"


def main(arguments: list[str]) -> int:
    """Run `observer STATE-FOLDER --listen HOST:PORT` until it is told to stop; return the exit code."""
    start_logging("observer")
    if len(arguments) != 3 or arguments[1] != "--listen":
        log.error("usage: observer STATE-FOLDER --listen HOST:PORT")
        return 2
    folder = ClusterFolder(Path(arguments[0]))
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    try:
        make_folder(folder.root / "secret", 0o700)
        with locked(folder.root / LOCK, "this cluster's observer", wait_s=5.0):
            serve(folder, ListenAddress.parse(arguments[2]), stopped)
    except (DalsegnoError, OSError) as error:
        log.error("the observer stops: %s", error)
        return 1
    return 0


def serve(folder: ClusterFolder, address: ListenAddress, stopped: threading.Event) -> None:
    """Serve at an address until `stopped` is set."""
    cluster = read_applied(folder) or Cluster(folder.name, "local", (), ())
    slurm = SlurmClient(LocalRunner(), os.environ, timeout_s=SLURM_S)
    target = cache(lambda: _open(folder))  # most pages need none, and its import takes long
    sessions = Sessions(folder.root / SESSIONS)
    live = LivePicture(LiveSources(folder, slurm), folder.name)
    data = ClusterData(folder, slurm, target, cluster)
    actions = ActionRunner(folder, slurm, target, os.environ)
    collector = _collector(slurm, cluster)
    token = None if cluster.monitoring.open_metrics else read_token(folder.root / TOKEN)
    app = WebApp(_site(folder, cluster, address), live, sessions, data, actions, MetricsEndpoint(collector, token))
    server = HttpServer(address.open(), app.handle)
    login = LoginServer(folder.root, sessions, str(address), lambda: target().owner())
    with contextlib.ExitStack() as stack:
        for each in (collector, live, login, server):
            each.start()
            stack.callback(each.close)
        log.info("observer %d serves %s", os.getpid(), address)
        stopped.wait()


def _open(folder: ClusterFolder) -> Target:
    from dalsegno.targets.registry import open_existing

    return open_existing(folder.root)


def _site(folder: ClusterFolder, cluster: Cluster, address: ListenAddress) -> WebSite:
    names = frozenset({address.host, cluster.head.lower(), socket.gethostname().lower()})
    return WebSite(folder.name, f"dalsegno-{folder.id}", names, folder.drills, folder.evidence)


def _collector(slurm: SlurmClient, cluster: Cluster) -> Collector:
    dialect = SlurmDialect(cluster.monitoring.compat)
    return Collector([slurm_sources(slurm, dialect)], status=slurm_status(dialect))
