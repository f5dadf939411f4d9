"""The web page that a user serves on a Slurm cluster that Dal Segno did not create.

It shows the nodes and jobs that this user can see in Slurm, the user's own runs, and the node records of
`dalsegno adopt watch`, if that program runs. The user can cancel their own runs and jobs there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.observe.http_server import HttpServer
from dalsegno.observe.metrics_endpoint import ListenAddress
from dalsegno.recovery.runs.run_records import RunRecord
from dalsegno.runs.submit.prepare import list_runs
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster, Slurm
from dalsegno.system.files import locked, make_folder
from dalsegno.targets.folder import ClusterFolder
from dalsegno.web.actions import cancel_run
from dalsegno.web.app import WebApp, WebSite
from dalsegno.web.data import ClusterData
from dalsegno.web.live import LivePicture
from dalsegno.web.login import SOCKET, LoginServer
from dalsegno.web.requests import ActionKind, ActionRefused, WebAction
from dalsegno.web.run_files import read_run
from dalsegno.web.sessions import Sessions, Visitor, WebRole
from dalsegno.web.snapshot import Automation, ClusterPicture, ControllerPart, HostPart, RunPicture, SlurmPart
from dalsegno.web.sources import ENDED_KEPT_S, ControllerReader, newest_runs, read_slurm

NO_RECOVERY = ControllerPart(automation=Automation(mode="off"))
LONGEST_SOCKET = 107  # bytes in the path of a Unix socket


@dataclass(frozen=True)
class ForeignCluster:
    """A cluster that Dal Segno did not create, as one user sees it."""

    name: str
    slurm: SlurmClient
    env: Mapping[str, str]
    accounting: bool
    runs: Path  # folder of the user's runs
    watcher: Callable[[], Path | None]  # returns the socket of `dalsegno adopt watch`; None if none runs


class ForeignReader:
    """The sources of the page's data."""

    def __init__(self, cluster: ForeignCluster) -> None:
        self._cluster = cluster
        self._watcher: ControllerReader | None = None
        self._ended: dict[Path, RunPicture] = {}
        self._ended_until = 0.0

    def slurm(self) -> SlurmPart:
        return read_slurm(self._cluster.slurm)

    def controller(self) -> ControllerPart:
        found = self._cluster.watcher()
        if found is None:
            self._watcher = None
            return NO_RECOVERY
        if self._watcher is None or self._watcher.socket != found:
            self._watcher = ControllerReader(found, agents=False)
        return self._watcher.read()

    def hosts(self) -> HostPart:
        return HostPart()

    def runs(self) -> tuple[RunPicture, ...]:
        """Return the user's runs. The files of ended runs are read again only after ENDED_KEPT_S seconds."""
        if time.monotonic() >= self._ended_until:
            self._ended, self._ended_until = {}, time.monotonic() + ENDED_KEPT_S
        found = [self._ended.get(run.root) or self._read(run.root) for run in list_runs(self._cluster.runs)]
        shown = newest_runs(view for view in found if view)
        self._ended = {Path(view.folder): view for view in shown if view.status.over}
        return shown

    def _read(self, folder: Path) -> RunPicture | None:
        return read_run(RunRecord(str(folder), os.geteuid()), kept=False)


class OwnActions:
    """Cancels the user's own runs and jobs, with the rights of the user."""

    def __init__(self, cluster: ForeignCluster) -> None:
        self._cluster = cluster

    def do(self, action: WebAction, visitor: Visitor, snapshot: ClusterPicture) -> str:
        if action.kind is not ActionKind.CANCEL:
            raise ActionRefused("this page can only cancel runs and jobs", hint="use Slurm's own commands")
        view = snapshot.run(action.run)
        if view is not None:
            cancel_run(view, self._cluster.env)
            return f"run {view.run} is being cancelled"
        self._cluster.slurm.cancel(action.job)
        return f"job {action.job} is cancelled"


def page_folder(home: Path, cluster: str) -> ClusterFolder:
    """Return the folder for the page of this cluster on this machine. The name of the folder depends on the host name,
    because login nodes may share the home folder."""
    name = f"{cluster} {socket.gethostname()}"
    return ClusterFolder(home / "web" / hashlib.blake2b(name.encode(), digest_size=4).hexdigest())


@contextlib.contextmanager
def serve_page(cluster: ForeignCluster, folder: ClusterFolder, listen: ListenAddress) -> Iterator[ListenAddress]:
    """Serve the page during the `with` block, and yield the address of the page."""
    if len(os.fsencode(folder.root / SOCKET)) > LONGEST_SOCKET:
        raise DalsegnoError(
            f"the path of the socket is longer than {LONGEST_SOCKET} bytes",
            where=str(folder.root / SOCKET),
            hint="set DALSEGNO_HOME to a shorter path",
        )
    for path in (folder.root, folder.run, folder.secret):
        make_folder(path, 0o700)
    listener = listen.open()
    address = ListenAddress(listen.host, listener.getsockname()[1])  # the kernel chooses the port if it was 0
    sessions, live = Sessions(folder.secret / "sessions.json"), LivePicture(ForeignReader(cluster), cluster.name)
    facts = Cluster.foreign(cluster.name, Slurm(accounting=cluster.accounting))
    data = ClusterData(_records(cluster, folder), cluster.slurm, object, lambda: facts)
    app = WebApp(_site(cluster, folder, address), live, sessions, data, OwnActions(cluster))
    server = HttpServer(listener, app.handle)
    with locked(folder.root / "lock", f"the web page of {cluster.name}"), contextlib.ExitStack() as stack:
        login = LoginServer(folder.root, sessions, str(address), partial(_role_of, os.geteuid()))
        stack.callback((folder.root / SOCKET).unlink, missing_ok=True)
        for each in (live, login, server):
            each.start()
            stack.callback(each.close)
        yield address


def _role_of(own: int, uid: int) -> WebRole:
    """Return the role of a caller. Only root and the user who serves the page can reach the socket; root may only view
    the page."""
    return WebRole.USER if uid == own else WebRole.VIEWER


def _records(cluster: ForeignCluster, folder: ClusterFolder) -> ClusterFolder:
    """Return the folder with the records of nodes: that of `dalsegno adopt watch` if it runs, and `folder` if it does
    not."""
    found = cluster.watcher()
    return ClusterFolder(found.parents[1]) if found else folder


def _site(cluster: ForeignCluster, folder: ClusterFolder, address: ListenAddress) -> WebSite:
    names = frozenset({address.host, socket.gethostname().lower()})
    return WebSite(cluster.name, f"dalsegno-{folder.id}", names, folder.drills, folder.evidence, "dalsegno web")
