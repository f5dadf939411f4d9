"""The program `observer`: serve the metrics and the web page of the cluster in a state folder.

It is a process of its own, so that neither a scrape nor a browser delays recovery. It may be killed at any time, and
it waits for a controller and for a slurmctld that do not answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.log import start_logging
from dalsegno.observe.http_server import HttpServer
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster
from dalsegno.system.files import locked, make_folder, read_text, write_atomic
from dalsegno.system.processes import LocalRunner
from dalsegno.targets.base import Target
from dalsegno.targets.folder import ClusterFolder, read_applied
from dalsegno.web.actions import ActionRunner
from dalsegno.web.app import MetricsAccess, WebApp, WebSite
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
    if len(arguments) != 3 or arguments[1] != "--listen" or not arguments[2].rpartition(":")[2].isdecimal():
        log.error("usage: observer STATE-FOLDER --listen HOST:PORT")
        return 2
    folder = ClusterFolder(Path(arguments[0]))
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    try:
        make_folder(folder.root / "secret", 0o700)
        with locked(folder.root / LOCK, "this cluster's observer", wait_s=5.0):
            serve(folder, arguments[2], stopped)
    except (DalsegnoError, OSError) as error:
        log.error("the observer stops: %s", error)
        return 1
    return 0


def serve(folder: ClusterFolder, address: str, stopped: threading.Event) -> None:
    """Serve at HOST:PORT until `stopped` is set."""
    cluster = read_applied(folder) or Cluster(folder.name, "local", (), ())
    slurm = SlurmClient(LocalRunner(), os.environ, timeout_s=SLURM_S)
    target = cache(lambda: _open(folder))  # most pages need none, and its import takes long
    sessions = Sessions(folder.root / SESSIONS)
    live = LivePicture(LiveSources(folder, slurm), folder.name)
    data = ClusterData(folder, slurm, target, cluster)
    actions = ActionRunner(folder, slurm, target, os.environ)
    with contextlib.ExitStack() as stack:
        metrics = MetricsAccess(_metrics(folder, cluster, slurm, stack), _token(folder, cluster))
        app = WebApp(_site(folder, cluster, address), live, sessions, data, actions, metrics)
        host, _, port = address.rpartition(":")
        listener = _listen(host.strip("[]"), int(port))
        server = HttpServer(listener, app.handle)
        login = LoginServer(folder.root, sessions, address, lambda: target().owner())
        for each in (live, login, server):
            each.start()
            stack.callback(each.close)
        log.info("observer %d serves %s", os.getpid(), address)
        stopped.wait()


def _open(folder: ClusterFolder) -> Target:
    from dalsegno.targets.registry import open_existing

    return open_existing(folder.root)


def _site(folder: ClusterFolder, cluster: Cluster, address: str) -> WebSite:
    names = frozenset({address.rpartition(":")[0].strip("[]"), cluster.head.lower(), socket.gethostname().lower()})
    return WebSite(folder.name, f"dalsegno-{folder.id}", names, folder.drills, folder.evidence)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


def _token(folder: ClusterFolder, cluster: Cluster) -> Callable[[], str]:
    """Return a function that reads the token of /metrics. It is made if there is none."""
    path = folder.root / TOKEN
    if cluster.monitoring.open_metrics:
        return lambda: ""
    if not (read_text(path) or "").strip():
        write_atomic(path, secrets.token_urlsafe(32) + "\n", 0o600)
    return lambda: (read_text(path) or "").strip() or secrets.token_urlsafe(32)  # without a token nobody may read


def _metrics(
    folder: ClusterFolder, cluster: Cluster, slurm: SlurmClient, stack: contextlib.ExitStack
) -> Callable[[], bytes]:
    """Start the collection of metrics and return a function that returns their text."""
    from dalsegno.observe.collector import Collector

    collector = Collector(())
    collector.start()
    stack.callback(collector.close)
    return collector.text
