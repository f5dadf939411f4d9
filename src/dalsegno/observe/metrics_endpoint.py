"""The HTTP side of metrics: the listening socket, the token, `/metrics` and `/healthz`."""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.observe.collector import Collector
from dalsegno.observe.exposition import CONTENT_TYPE
from dalsegno.observe.http_server import HttpRequest, HttpResponse

MIN_TOKEN, MAX_TOKEN = 16, 4096  # minimum and maximum number of characters of a token
_HOME = b"Dal Segno's metrics are at /metrics.\n"


class MetricsEndpoint:
    """Answers requests with the collector's text. Without a token, everybody who can connect gets the text."""

    def __init__(self, collector: Collector, token: str | None) -> None:
        self._collector, self._token = collector, token

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if request.method not in ("GET", "HEAD"):
            return HttpResponse(405, b"only GET and HEAD\n", headers=(("Allow", "GET, HEAD"),))
        if request.path == "/healthz":
            return self._health()
        if request.path == "/":
            return HttpResponse(body=_HOME)
        if request.path != "/metrics":
            return HttpResponse(404, b"not found\n")
        if not may_read(request, self._token):
            return HttpResponse(401, b"a bearer token is needed\n", headers=(("WWW-Authenticate", "Bearer"),))
        return HttpResponse(body=self._collector.text(), content_type=CONTENT_TYPE)

    def _health(self) -> HttpResponse:
        statuses = self._collector.statuses()
        failing = [one.name for one in statuses if not one.success]
        if not failing:
            return HttpResponse(body=b"ok\n")
        return HttpResponse(503 if len(failing) == len(statuses) else 200, f"failing: {' '.join(failing)}\n".encode())


def may_read(request: HttpRequest, token: str | None) -> bool:
    """Return whether a request has the right bearer token; True if no token is needed."""
    if token is None:
        return True
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


def read_token(path: Path) -> str:
    """Return the token in a file that only its owner can read. If there is no file, write one with a new token."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return _read_own(path)
    except OSError as error:
        hint = "name a file in a folder that you may write to"
        raise DalsegnoError(f"the token file cannot be written: {error.strerror}", where=str(path), hint=hint) from None
    with os.fdopen(descriptor, "w") as file:
        token = secrets.token_urlsafe(32)
        file.write(f"{token}\n")
    return token


def _read_own(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        hint = "name a file that only you may read"
        raise DalsegnoError(f"the token file cannot be read: {error.strerror}", where=str(path), hint=hint) from None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o077:
            raise DalsegnoError(
                "other users can read or replace the token file", where=str(path), hint=f"chmod 600 {path}"
            )
        token = file.read(MAX_TOKEN + 1).decode(errors="replace").strip()
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN or not token.isascii() or not token.isprintable():
        hint = f"write {MIN_TOKEN} printable ASCII characters or more, or remove the file for a new token"
        raise DalsegnoError("the token file has no valid token", where=str(path), hint=hint)
    return token


@dataclass(frozen=True)
class ListenAddress:
    """The address and port on which a server listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> ListenAddress:
        """Parse `127.0.0.1:9341`, `[::1]:9341`, or `:9341` for all addresses."""
        host, colon, port = text.rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not colon or not port.isdecimal() or len(port) > 5 or int(port) > 65535 or "[" in host or "/" in host:
            raise UsageError(f"invalid address `{text}`", hint="such as `127.0.0.1:9341` or `[::1]:9341`")
        return cls(host, int(port))

    @property
    def loopback(self) -> bool:
        """Return whether only processes of this machine can connect."""
        return self.host == "localhost" or self.host == "::1" or self.host.startswith("127.")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def open(self) -> socket.socket:
        """Return a listening socket. If that fails, raise an error with a hint, for example if the port is in use."""
        try:
            family, _, _, _, address = socket.getaddrinfo(
                self.host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            return socket.create_server((str(address[0]), self.port), family=family, backlog=64)
        except OSError as error:
            raise DalsegnoError(f"cannot listen on {self}: {_reason(error)}", hint=_listen_hint(error, self)) from None


def _reason(error: OSError) -> str:
    return "the port is in use" if error.errno == errno.EADDRINUSE else str(error.strerror or error)


def _listen_hint(error: OSError, address: ListenAddress) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"`ss -ltnp 'sport = :{address.port}'` shows who uses it; `--listen` takes another port"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "ports below 1024 need root; use a higher one"
    return "use an address of this machine, such as 127.0.0.1"
