"""A small HTTP/1.1 server with limits, for the metrics and the web page. It runs in threads of its own.

Peers are unknown until a handler has checked their token. So connections, bytes and times are limited, for all peers
together and for each address. If there are too many connections, `WaitingConnections` closes one to make room for a new
one, but never while its answer is computed or streamed. So peers that send nothing cannot block others.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

from dalsegno.wire.bounds import WaitingConnections

log = logging.getLogger("http")

MAX_CONNECTIONS = 128
MAX_PER_ADDRESS = 96
MAX_HEAD_BYTES = 16 << 10
MAX_BODY_BYTES = 64 << 10
MAX_FIELDS = 32  # maximum number of fields in a query string
REQUEST_S = 10.0  # time limit for receiving a request, and for an idle connection
WRITE_S = 20.0  # a peer that reads nothing for this long is disconnected
REASONS = {
    200: "OK", 204: "No Content", 303: "See Other", 304: "Not Modified", 400: "Bad Request", 401: "Unauthorized",
    403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed", 408: "Request Timeout", 409: "Conflict",
    413: "Content Too Large", 429: "Too Many Requests", 431: "Request Header Fields Too Large",
    500: "Internal Server Error", 503: "Service Unavailable",
}  # fmt: skip


@dataclass(frozen=True)
class HttpRequest:
    """A request. Header names are in lower case. If a query parameter is repeated, the last one counts."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    peer: str = ""


@dataclass(frozen=True)
class HttpResponse:
    """An answer. A body that is an iterator is streamed until it ends or the peer disconnects; then the iterator is
    closed."""

    status: int = 200
    body: bytes | Iterator[bytes] = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


Handler = Callable[[HttpRequest], HttpResponse]


class BadRequest(Exception):
    """A request that cannot be parsed or is too large; `status` is the HTTP status of the answer."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(eq=False)
class _HttpPeer:
    """An open connection. Unless it is being answered, the server may close it to make room for another one."""

    sock: socket.socket
    owner: str  # the peer's address
    answered: bool = False
    until: float = float("inf")  # no deadline here: the thread of the connection has its own

    def disconnect(self) -> None:
        """Wake the thread of the connection. The thread then closes the connection."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class HttpServer:
    """Answers requests at a listening socket with `handler`, one thread per connection, until the server is closed."""

    def __init__(self, listener: socket.socket, handler: Handler, max_connections: int = MAX_CONNECTIONS) -> None:
        self._listener, self._handler = listener, handler
        self._open: WaitingConnections[_HttpPeer] = WaitingConnections(
            max_connections, MAX_PER_ADDRESS, may_close=lambda peer: not peer.answered
        )
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self.serve, name="http", daemon=True)

    def start(self) -> None:
        """Serve in the background."""
        self._thread.start()

    def serve(self) -> None:
        """Accept connections until the server is closed."""
        while not self._closed.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError:
                if self._closed.wait(0.05):  # no file descriptor is free: wait until connections have ended
                    return
                continue
            self._admit(sock, str(address[0]) if isinstance(address, tuple) else "")

    def close(self) -> None:
        """Stop accepting and disconnect all peers."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for peer in self._open.all():
                peer.disconnect()

    def _admit(self, sock: socket.socket, address: str) -> None:
        peer = _HttpPeer(sock, address)
        with self._lock:
            excess = self._open.add(peer)
            if excess is not None:
                self._open.remove(excess)
            if excess is not None and excess is not peer:
                excess.disconnect()
        if excess is peer:
            with contextlib.suppress(OSError):
                sock.settimeout(0.1)
                sock.sendall(_head(HttpResponse(503), length=0, keep=False))
            sock.close()
            return
        threading.Thread(target=self._talk, args=(peer,), name="http-peer", daemon=True).start()

    def _set_answered(self, peer: _HttpPeer, answered: bool) -> bool:
        """Mark whether a connection is being answered, which protects it from being closed. Return False if it was
        already closed to make room."""
        with self._lock:
            peer.answered = answered
            return peer in self._open

    def _talk(self, peer: _HttpPeer) -> None:
        sock = peer.sock
        try:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            rest = b""
            while not self._closed.is_set():
                try:
                    request, keep, rest = read_request(sock, peer.owner, rest)
                except BadRequest as error:
                    self._send(sock, HttpResponse(error.status, f"{error}\n".encode()), keep=False, head=False)
                    return
                if request is None or not self._set_answered(peer, True):
                    return
                response = self._answer(request)
                # While a short answer is sent, the connection may be closed to make room for another one. A stream is
                # never closed for that.
                self._set_answered(peer, not isinstance(response.body, bytes))
                if not self._send(sock, response, keep=keep, head=request.method == "HEAD"):
                    return
        except OSError:
            pass  # the peer has disconnected
        except Exception:  # the handler failed after the head of the response was sent
            log.exception("a streamed answer failed")
        finally:
            with self._lock:
                self._open.remove(peer)
            sock.close()

    def _answer(self, request: HttpRequest) -> HttpResponse:
        try:
            return self._handler(request)
        except Exception:  # an error in one page must not stop the server
            log.exception("%s %s failed", request.method, request.path)
            return HttpResponse(500, b"internal error; see the log of the server\n")

    def _send(self, sock: socket.socket, response: HttpResponse, *, keep: bool, head: bool) -> bool:
        """Send a response; return whether the connection can take another request."""
        sock.settimeout(WRITE_S)
        body = response.body
        if isinstance(body, bytes):
            sock.sendall(_head(response, length=len(body), keep=keep) + (b"" if head else body))
            return keep
        try:
            sock.sendall(_head(response, length=None, keep=False))
            for chunk in () if head else body:
                if self._closed.is_set():
                    break
                sock.sendall(chunk)
        finally:
            if (close := getattr(body, "close", None)) is not None:
                close()
        return False


def read_request(sock: socket.socket, peer: str, received: bytes) -> tuple[HttpRequest | None, bool, bytes]:
    """Return the next request (None if the peer left), whether to keep the connection, and the bytes that follow."""
    until = time.monotonic() + REQUEST_S
    while b"\r\n\r\n" not in received:
        if len(received) > MAX_HEAD_BYTES:
            raise BadRequest(431, "the header is too long")
        data = _receive(sock, until, idle=not received)
        if not data:
            return None, False, b""
        received += data
    head, _, rest = received.partition(b"\r\n\r\n")
    if len(head) > MAX_HEAD_BYTES:
        raise BadRequest(431, "the header is too long")
    method, target, version, headers = parse_head(head)
    length = _body_length(headers)
    while len(rest) < length:
        data = _receive(sock, until)
        if not data:
            return None, False, b""
        rest += data
    try:
        url = urlsplit(target)
        query = dict(parse_qsl(url.query, keep_blank_values=True, max_num_fields=MAX_FIELDS))
    except ValueError:
        raise BadRequest(400, "invalid address") from None
    keep = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
    return HttpRequest(method, url.path, query, headers, rest[:length], peer), keep, rest[length:]


def parse_head(head: bytes) -> tuple[str, str, str, dict[str, str]]:
    """Return method, target, version and headers. A repeated or unprintable header is refused."""
    try:
        first, *lines = head.decode("ascii").split("\r\n")
    except UnicodeDecodeError:
        raise BadRequest(400, "the header is not ASCII") from None
    words = first.split(" ")
    valid = first.isprintable() and len(words) == 3 and words[2] in ("HTTP/1.1", "HTTP/1.0")
    if not valid or not words[0].isalpha() or words[1][:1] != "/":
        raise BadRequest(400, "not an HTTP request")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name.strip() != name or name in headers or not line.isprintable():
            raise BadRequest(400, "invalid header")
        headers[name] = value.strip()
    return words[0], words[1], words[2], headers


def _body_length(headers: Mapping[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise BadRequest(400, "chunked requests are not supported")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 9:
        raise BadRequest(400, "invalid Content-Length")
    if int(length) > MAX_BODY_BYTES:
        raise BadRequest(413, "the body is too long")
    return int(length)


def _receive(sock: socket.socket, until: float, idle: bool = False) -> bytes:
    left = until - time.monotonic()
    try:
        sock.settimeout(max(left, 0.001))
        return sock.recv(65536)
    except TimeoutError:
        if idle:
            return b""
        raise BadRequest(408, "the request took too long") from None


def _head(response: HttpResponse, *, length: int | None, keep: bool) -> bytes:
    """Return the head of a response. Header values come from our own code; a line break in one would be a bug."""
    lines = [f"HTTP/1.1 {response.status} {REASONS.get(response.status, 'Status')}"]
    fixed = [("Content-Type", response.content_type), ("Connection", "keep-alive" if keep else "close")]
    if length is not None:
        fixed.append(("Content-Length", str(length)))
    for name, value in (*fixed, ("X-Content-Type-Options", "nosniff"), *response.headers):
        if "\r" in value or "\n" in value:
            raise ValueError(f"line break in header {name}")
        lines.append(f"{name}: {value}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
