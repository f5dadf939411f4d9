"""The observer's Unix socket, from which `dalsegno web` gets an address that logs its user in.

Every user of the machine may connect. The kernel reports the caller's uid, which determines the role.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.recovery.client import ask, start_hint
from dalsegno.recovery.refusal_log import RefusalLog
from dalsegno.system.files import user_of
from dalsegno.system.hanging_calls import slowness
from dalsegno.system.network import listen_at
from dalsegno.web.sessions import LINK_S, TOKEN_S, Sessions, WebRole
from dalsegno.wire.frames import Message
from dalsegno.wire.requests import RequestServer

log = logging.getLogger("web.login")

SOCKET = "run/observer.sock"  # path relative to the cluster's state folder
MAX_ANSWER = 1 << 16
ANSWER_S = 5.0
START_S = 2.0


def role_on_cluster(uid: int, owner: int | None) -> WebRole:
    """Return a user's role. Root, the cluster's owner and the web server's own user may operate the cluster."""
    return WebRole.OPERATOR if uid in {0, owner, os.geteuid()} else WebRole.USER


class LoginServer:
    """The server of the socket. It answers `{"login": true}`, `{"link": true}` and `{"revoke": true}`.

    `address` is the HOST:PORT of the page. Operators may also send `{"revoke": true, "uid": N}`.
    """

    def __init__(
        self,
        folder: Path,
        sessions: Sessions,
        address: str,
        role_of: Callable[[int], WebRole],
        name_of: Callable[[int], str] = user_of,
    ) -> None:
        self._sessions, self._address, self._role_of, self._name_of = sessions, address, role_of, name_of
        self._selector = selectors.DefaultSelector()
        listener = listen_at(folder / SOCKET, 0o666)
        complain = RefusalLog(log.warning).log
        self._server = RequestServer(listener, self._selector, self.answer, complain, MAX_ANSWER)
        self._closed = threading.Event()

    def start(self) -> None:
        """Answer in the background."""
        threading.Thread(target=self.serve, name="login", daemon=True).start()

    def serve(self) -> None:
        """Answer until the server is closed."""
        while not self._closed.is_set():
            due = self._server.turn()
            wait = 1.0 if due is None else min(max(due - time.monotonic(), 0.0), 1.0)
            for key, events in self._selector.select(wait):
                key.data(events)
        self._server.close()
        self._selector.close()

    def close(self) -> None:
        self._closed.set()

    def answer(self, uid: int, request: Message) -> Message:
        """Answer one request of a user."""
        role, user = self._role_of(uid), self._name_of(uid)
        if request == {"login": True}:
            log.info("login of %s (%s)", user, role.value)
            return self._granted(self._sessions.issue(role, uid, user), role, TOKEN_S)
        if request == {"link": True}:
            if role is not WebRole.OPERATOR:
                return _refusal("only root and the cluster's owner may make read-only links", "use sudo")
            log.info("read-only link made by %s", user)
            return self._granted(self._sessions.make_link(uid, user), WebRole.VIEWER, LINK_S)
        if request == {"revoke": True}:
            return self._revoke(0 if role is WebRole.OPERATOR else uid, user)
        if role is WebRole.OPERATOR and request.keys() == {"revoke", "uid"} and type(request["uid"]) is int:
            return self._revoke(request["uid"], user)
        return _refusal("unknown request", "use `login`, `link` or `revoke`")

    def _revoke(self, uid: int, user: str) -> Message:
        ended = self._sessions.revoke(uid)
        log.info("%d sessions and links ended by %s", ended, user)
        return {"revoked": ended}

    def _granted(self, token: str, role: WebRole, valid_s: float) -> Message:
        return {"token": token, "role": role.value, "address": self._address, "valid_s": valid_s}


def _refusal(what: str, hint: str) -> Message:
    return {"error": what, "hint": hint}


@dataclass(frozen=True)
class LoginAddress:
    """The address that logs a user in."""

    token: str
    role: WebRole
    host: str
    port: int
    valid_s: float

    def url(self, host: str = "") -> str:
        """Return the address. `host` replaces the host name, for a tunnel that ends there."""
        shown = host or self.host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}/login?token={self.token}"


def request_login(folder: Path, *, read_only: bool = False) -> LoginAddress:
    """Ask the observer of this cluster for an address that logs this user in, or for a read-only link."""
    answer = _asked(folder, {"link": True} if read_only else {"login": True})
    host, _, port = str(answer["address"]).rpartition(":")
    return LoginAddress(
        str(answer["token"]), WebRole(answer["role"]), host.strip("[]"), int(port), float(answer["valid_s"])
    )


def revoke_logins(folder: Path, uid: int | None = None) -> int:
    """End sessions and links, and return how many. An operator ends those of `uid` or of all users, any other user only
    their own."""
    whose = {} if uid is None else {"uid": uid}
    return int(_asked(folder, {"revoke": True, **whose})["revoked"])


def _asked(folder: Path, request: Message) -> Message:
    """Return the observer's answer. Wait for its socket first, because it may still be starting after `up`."""
    until = time.monotonic() + START_S * slowness()
    while not (folder / SOCKET).exists() and (folder / "run").exists() and time.monotonic() < until:
        time.sleep(0.05)
    try:
        answer = ask(folder / SOCKET, request, ANSWER_S)
    except DalsegnoError as error:
        raise DalsegnoError(
            "the web page of this cluster does not answer",
            where=str(folder / SOCKET),
            hint=start_hint(folder / SOCKET, os.geteuid()),
        ) from error
    if "error" in answer:
        raise DalsegnoError(str(answer["error"]), hint=str(answer.get("hint", "")))
    return answer
