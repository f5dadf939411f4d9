"""`dalsegno web`: open the web page of a cluster."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.interrupts import Interrupted, stoppable
from dalsegno.cli.out import cluster_option, json_option
from dalsegno.errors import CommandFailed, DalsegnoError, UsageError

if TYPE_CHECKING:
    from dalsegno.targets.folder import ClusterFolder
    from dalsegno.web.login import LoginAddress
    from dalsegno.web.own_page import ForeignCluster

# path below the home folder; the file's login token works once, and only for a minute
PAGE = ".local/state/dalsegno/web-login.html"


@click.command()
@cluster_option
@click.option("--no-open", is_flag=True, help="Only print the address; do not open a browser.")
@click.option("--tunnel", is_flag=True, help="Print the ssh command for a browser on another machine.")
@click.option(
    "--read-only", is_flag=True, help="Print a read-only link, as for a wall display. It stays valid for 90 days."
)
@click.option(
    "--revoke",
    is_flag=True,
    help="End your sessions. For root and the cluster's owner: end all sessions and revoke all links.",
)
@click.option(
    "--listen",
    default="127.0.0.1:0",
    metavar="HOST:PORT",
    help="Address of the page, on a cluster that Dal Segno did not create. Port 0 is any free port.",
)
@json_option
def command(
    name: str | None, no_open: bool, tunnel: bool, read_only: bool, revoke: bool, listen: str, json_: bool
) -> None:
    """Open the web page of the cluster. The printed address works once and expires after a minute.

    Root and the cluster's owner can drain and resume nodes there, cancel all runs and jobs, pause recovery, and inject
    faults. Other users see everything, but can cancel only their own runs and jobs.

    On a cluster that Dal Segno did not create, the command itself serves the page, for you alone, until Ctrl-C.

    \b
    dalsegno web
    dalsegno web --tunnel
    dalsegno web --read-only --no-open
    """
    from dalsegno.targets.folder import read_applied
    from dalsegno.web.login import request_login, revoke_logins

    if revoke and (tunnel or read_only):
        raise UsageError("`--revoke` cannot be combined with other options", hint="leave one out")
    foreign = _find_foreign(name)
    if foreign is not None:
        if read_only:
            raise UsageError("this page has no read-only links", hint="leave out `--read-only`")
        own = _own_folder(foreign)
        if revoke:
            _report_revoked(revoke_logins(own.root), json_)
        else:
            _serve_own(foreign, own, listen, partial(_tell, tunnel=tunnel, no_open=no_open, json_=json_))
        return
    folder = _find_folder(name)
    applied = read_applied(folder)
    if applied is not None and not applied.monitoring.enabled:
        raise DalsegnoError(
            f"the web page of {folder.name} is turned off",
            hint="remove `monitoring: {enabled: false}` from the cluster file, then run `dalsegno up`",
        )
    if revoke:
        _report_revoked(revoke_logins(folder.root), json_)
        return
    _tell(request_login(folder.root, read_only=read_only), tunnel=tunnel, no_open=no_open or read_only, json_=json_)


def _tell(login: LoginAddress, *, tunnel: bool, no_open: bool, json_: bool) -> None:
    """Print the login address. Also open a browser, unless an option asks for other output."""
    if json_:
        facts = {"url": login.url("localhost" if tunnel else ""), "role": login.role.value, "valid_s": login.valid_s}
        out.as_json({**facts, **({"tunnel": tunnel_command(login)} if tunnel else {})})
    elif tunnel:
        out.talk("run this on your own machine, then open the address there:")
        out.data(tunnel_command(login))
        out.data(login.url("localhost"))
        _tell_limits(login)
    else:
        out.data(login.url())
        _tell_limits(login)
        if not no_open:
            _open(login)


# A cluster that Dal Segno did not create


def _find_foreign(name: str | None) -> ForeignCluster | None:
    """Return the cluster that this shell uses if Dal Segno did not create it; None otherwise."""
    from dalsegno.cluster import find_slurm, folder_of, foreign_slurm, runs_home

    slurm = foreign_slurm(name) if folder_of(os.environ) is None else None
    if slurm is None:
        return None
    from dalsegno.cli.controller_requests import is_silence, meaning_of
    from dalsegno.cluster import no_answer
    from dalsegno.web.own_page import ForeignCluster

    try:
        config = slurm.client.config()
    except CommandFailed as fault:
        meaning = meaning_of(fault)
        raise no_answer() if meaning is fault and is_silence(fault) else meaning from None
    accounting = config.get("AccountingStorageType") == "accounting_storage/slurmdbd"
    found = config.get("ClusterName", "slurm")
    return ForeignCluster(found, slurm.client, slurm.env, accounting, runs_home(), lambda: find_slurm().watcher)


def _own_folder(cluster: ForeignCluster) -> ClusterFolder:
    from dalsegno.cluster import home
    from dalsegno.web.own_page import page_folder

    return page_folder(home(), cluster.name)


def _serve_own(
    cluster: ForeignCluster, folder: ClusterFolder, listen: str, tell: Callable[[LoginAddress], None]
) -> None:
    """Serve the page until Ctrl-C. If this user already serves it on this machine, only print another login address."""
    from dalsegno.log import start_logging
    from dalsegno.observe.metrics_endpoint import ListenAddress
    from dalsegno.web.login import SOCKET, request_login
    from dalsegno.web.own_page import serve_page

    address = ListenAddress.parse(listen)
    if (folder.root / SOCKET).exists():
        with contextlib.suppress(DalsegnoError):  # the socket may be left from a killed server
            tell(request_login(folder.root))
            return
    start_logging("web")
    with contextlib.suppress(Interrupted), stoppable(), serve_page(cluster, folder, address) as served:
        if not served.loopback:
            out.warn(f"the page at {served} is not encrypted: others on its network can read it")
        tell(request_login(folder.root))
        out.talk(f"serving the page of {cluster.name}; Ctrl-C ends it, `dalsegno web` prints another address")
        threading.Event().wait()


def _find_folder(name: str | None) -> ClusterFolder:
    """Return the state folder of the named cluster; without a name, that of this shell's cluster or of the only one."""
    from dalsegno.cluster import find_place, folder_of
    from dalsegno.targets.folder import ClusterFolder

    here = None if name else folder_of(os.environ)
    return here or ClusterFolder(find_place(name).folder)


def tunnel_command(login: LoginAddress) -> str:
    """Return the ssh command that makes the page reachable on the user's own machine, at the same port."""
    from dalsegno.system.files import user_of
    from dalsegno.system.ownership import caller

    place = f"{user_of(caller())}@{socket.gethostname()}"
    return shlex.join(["ssh", "-N", "-L", f"{login.port}:{login.host}:{login.port}", place])


def _tell_limits(login: LoginAddress) -> None:
    from dalsegno.web.sessions import WebRole

    if login.role is not WebRole.VIEWER:
        out.talk(f"the address works once, within {login.valid_s:.0f} s")


def _report_revoked(count: int, json_: bool) -> None:
    if json_:
        out.as_json({"revoked": count})
    else:
        out.talk(f"{count} sessions and links ended" if count != 1 else "1 session or link ended")


def _open(login: LoginAddress) -> None:
    """Open the browser if there is a display. As root, do nothing: the display may belong to another user."""
    import webbrowser

    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if display and os.geteuid() != 0 and open_page(login, Path.home() / PAGE, webbrowser.open):
        out.talk("opened in your browser")


def open_page(login: LoginAddress, path: Path, browse: Callable[[str], bool]) -> bool:
    """Open a private file in a browser, which then loads the web page. Return whether there is a browser.

    All users of the machine can see the arguments of a browser, so the login address must not be an argument.
    """
    from dalsegno.system.files import make_folder, write_atomic
    from dalsegno.web.html import Markup, link, tag

    leads = tag("meta", http_equiv="refresh", content=f"0;url={login.url()}")
    make_folder(path.parent, 0o700)
    page = Markup("<!doctype html>") + leads + tag("title", "Dal Segno") + link(login.url(), "Continue")
    write_atomic(path, page, 0o600, durable=False)
    return browse(path.as_uri())
