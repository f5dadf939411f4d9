"""`dalsegno web`: open the web page of a cluster."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.out import cluster_option, json_option
from dalsegno.errors import DalsegnoError, UsageError

if TYPE_CHECKING:
    from dalsegno.targets.folder import ClusterFolder
    from dalsegno.web.login import LoginAddress

PAGE = ".local/state/dalsegno/web-login.html"  # a file in the home folder; the token in it is valid once, for a minute


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
@json_option
def command(name: str | None, no_open: bool, tunnel: bool, read_only: bool, revoke: bool, json_: bool) -> None:
    """Open the web page of the cluster. The printed address works once and expires after a minute.

    Root and the cluster's owner can drain and resume nodes there, cancel all runs and jobs, pause recovery, and inject
    faults. Other users see everything, but can cancel only their own runs and jobs.

    \b
    dalsegno web
    dalsegno web --tunnel
    dalsegno web --read-only --no-open
    """
    from dalsegno.targets.folder import read_applied
    from dalsegno.web.login import request_login, revoke_logins

    if revoke and (tunnel or read_only):
        raise UsageError("`--revoke` cannot be combined with other options", hint="leave one out")
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
    login = request_login(folder.root, read_only=read_only)
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
        if not no_open and not read_only:
            _open(login)


def _find_folder(name: str | None) -> ClusterFolder:
    """Return the state folder of the named cluster, else of the one this shell uses, else of the only one."""
    from dalsegno.cluster import find_place, folder_of
    from dalsegno.targets.folder import ClusterFolder

    here = None if name else folder_of(os.environ)
    return here or ClusterFolder(find_place(name).folder)


def tunnel_command(login: LoginAddress) -> str:
    """Return the ssh command that makes the page reachable at the same port of the user's own machine."""
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
    """Open the browser if there is a display. Root must not start a browser that belongs to another user's display."""
    import webbrowser

    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if display and os.geteuid() != 0 and open_page(login, Path.home() / PAGE, webbrowser.open):
        out.talk("opened in your browser")


def open_page(login: LoginAddress, path: Path, browse: Callable[[str], bool]) -> bool:
    """Let a browser open a private file that leads to the page; return whether there is a browser.

    All users of the machine can see the arguments of a browser, so the address itself must not be one of them.
    """
    from dalsegno.system.files import make_folder, write_atomic
    from dalsegno.web.html import Markup, link, tag

    leads = tag("meta", http_equiv="refresh", content=f"0;url={login.url()}")
    make_folder(path.parent, 0o700)
    page = Markup("<!doctype html>") + leads + tag("title", "Dal Segno") + link(login.url(), "Continue")
    write_atomic(path, page, 0o600, durable=False)
    return browse(path.as_uri())
