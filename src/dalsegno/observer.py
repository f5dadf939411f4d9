"""The program `observer`: serve the metrics and the web page of the cluster in a state folder.

The observer runs in a separate process, so that neither a scrape nor a browser delays recovery. It can be killed at any
time. If the controller or slurmctld does not answer, the observer waits for it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.log import start_logging
from dalsegno.observe.collector import INTERVAL_S, Collector
from dalsegno.observe.http_server import HttpServer
from dalsegno.observe.metrics_endpoint import ListenAddress, MetricsEndpoint, read_token
from dalsegno.observe.slurm_compat import SlurmDialect
from dalsegno.observe.slurm_source import slurm_sources, slurm_status
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.journal.metrics import RecoveryMetrics, RecoveryScope, list_runs
from dalsegno.runs.metrics import RunMetrics
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster, Slurm
from dalsegno.system.files import locked, make_folder, user_of
from dalsegno.system.processes import LocalRunner
from dalsegno.targets.base import Target, name_user
from dalsegno.targets.folder import ClusterFolder, read_applied
from dalsegno.web.actions import ActionRunner
from dalsegno.web.app import WebApp, WebSite
from dalsegno.web.data import ClusterData
from dalsegno.web.live import LivePicture
from dalsegno.web.login import LoginServer, role_on_cluster
from dalsegno.web.sessions import Sessions, WebRole
from dalsegno.web.sources import ClusterReader

log = logging.getLogger("observer")

USAGE = "STATE-FOLDER --listen HOST:PORT [--compat NAME] [--interval SECONDS] [--open-metrics]"
SLURM_S = 15.0
SESSIONS, TOKEN, LOCK = "secret/web-sessions.json", "secret/metrics-token", "secret/observer.lock"


@dataclass(frozen=True)
class ObserverOptions:
    """The options of the command line. `open_metrics` says whether /metrics can be read without a token."""

    folder: ClusterFolder
    listen: ListenAddress
    dialect: SlurmDialect = SlurmDialect.VPENSO
    open_metrics: bool = False
    interval_s: float = INTERVAL_S


def parse_options(arguments: Sequence[str]) -> ObserverOptions:
    """Parse the command line, whose syntax is in USAGE."""
    folder, *words = arguments or [""]
    open_metrics = "--open-metrics" in words
    plain = [word for word in words if word != "--open-metrics"]
    given = dict(zip(plain[::2], plain[1::2], strict=False))
    names = [each.value for each in SlurmDialect]
    interval = given.get("--interval", f"{INTERVAL_S:.0f}")
    unknown = set(given) - {"--listen", "--compat", "--interval"}
    if not folder or len(plain) != 2 * len(given) or "--listen" not in given or unknown or not interval.isdecimal():
        raise UsageError("invalid arguments", hint=f"observer {USAGE}")
    if given.get("--compat", names[0]) not in names:
        raise UsageError(f"unknown metric names `{given['--compat']}`", hint=f"use one of {', '.join(names)}")
    dialect = SlurmDialect(given.get("--compat", names[0]))
    listen = ListenAddress.parse(given["--listen"])
    return ObserverOptions(ClusterFolder(Path(folder)), listen, dialect, open_metrics, max(1.0, float(interval)))


def main(arguments: list[str]) -> int:
    """Run the observer until it receives a signal to stop; return the exit code."""
    start_logging("observer")
    gc.set_threshold(200_000)  # parsing a long queue creates many objects that garbage collection would scan in vain
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    try:
        options = parse_options(arguments)
        make_folder(options.folder.root / "secret", 0o700)
        with locked(options.folder.root / LOCK, "this cluster's observer", wait_s=5.0):
            serve(options, stopped)
    except (DalsegnoError, OSError) as error:
        log.error("the observer stops: %s", error)
        return error.exit_code if isinstance(error, DalsegnoError) else 1
    return 0


class AppliedCluster:
    """The cluster as `up` last applied it. Its file is read again when it has changed."""

    def __init__(self, folder: ClusterFolder) -> None:
        self._folder, self._read_at = folder, 0
        self._cluster = Cluster(folder.name, "", (), (), slurm=Slurm(accounting=False))

    def __call__(self) -> Cluster:
        with contextlib.suppress(OSError, DalsegnoError):  # the file does not exist yet, or is being replaced
            stamp = self._folder.applied.stat().st_mtime_ns
            if stamp != self._read_at:
                self._cluster, self._read_at = read_applied(self._folder) or self._cluster, stamp
        return self._cluster


def recovery_scope(cluster: Cluster) -> RecoveryScope:
    """Return the limits of recovery, and the nodes of each partition."""
    spares = frozenset(node.name for node in cluster.nodes if node.spare)
    policy = Policy.of(cluster.health, frozenset(), spares)  # no remedies, because the limits do not depend on them
    return RecoveryScope(policy, {partition.name: partition.nodes for partition in cluster.partitions})


def serve(options: ObserverOptions, stopped: threading.Event) -> None:
    """Serve until `stopped` is set."""
    folder, address = options.folder, options.listen
    slurm = SlurmClient(LocalRunner(), os.environ, timeout_s=SLURM_S)
    target = cache(lambda: _open(folder))  # opened on first use: most pages need no target
    sessions = Sessions(folder.root / SESSIONS)
    live = LivePicture(ClusterReader(folder, slurm, target), folder.name)
    cluster = AppliedCluster(folder)
    data = ClusterData(folder, slurm, target, cluster)
    actions = ActionRunner(folder, slurm, target, os.environ)
    collector = Collector(
        [
            slurm_sources(slurm, options.dialect),
            RecoveryMetrics(folder.journal, lambda: recovery_scope(cluster())),
            RunMetrics(lambda: list_runs(folder.runs)),
        ],
        options.interval_s,
        status=slurm_status(options.dialect),
    )
    token = None if options.open_metrics else read_token(folder.root / TOKEN)
    app = WebApp(_site(folder, address), live, sessions, data, actions, MetricsEndpoint(collector, token))
    server = HttpServer(address.open(), app.handle)
    name_of = partial(_name_user, target)
    role_of = partial(_role_of, target)
    login = LoginServer(folder.root, sessions, str(address), role_of, name_of)
    with contextlib.ExitStack() as stack:
        for each in (collector, live, login, server):
            each.start()
            stack.callback(each.close)
        log.info("observer %d serves %s", os.getpid(), address)
        stopped.wait()


def _open(folder: ClusterFolder) -> Target:
    from dalsegno.targets.registry import open_existing

    return open_existing(folder.root)


def _role_of(target: Callable[[], Target], uid: int) -> WebRole:
    return role_on_cluster(uid, target().owner())


def _name_user(target: Callable[[], Target], uid: int) -> str:
    try:
        return name_user(target(), uid)
    except DalsegnoError:  # the target cannot look up the name: ask this machine
        return user_of(uid)


def _site(folder: ClusterFolder, address: ListenAddress) -> WebSite:
    names = frozenset({address.host, socket.gethostname().lower()})
    login = f"dalsegno web --cluster {folder.name}"
    return WebSite(folder.name, f"dalsegno-{folder.id}", names, folder.drills, folder.evidence, login)
