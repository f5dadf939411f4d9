"""Peers that try to keep others from the web page: floods, silent connections, abandoned streams."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from dalsegno.observe import http_server
from dalsegno.observe.http_server import HttpRequest, HttpServer
from dalsegno.web.sessions import Visitor, WebRole
from dalsegno.web.stream import FOR_OPERATORS, MAX_PER_VISITOR, MAX_STREAMS, StreamSlots
from tests.web.played import HOST, PlayedSite, small_cluster

Connect = Callable[..., socket.socket]
ADA = Visitor(WebRole.USER, 1001, "ada")
ROOT = Visitor(WebRole.OPERATOR, 0, "root")
BEN = Visitor(WebRole.USER, 1002, "ben")


@pytest.fixture
def site() -> Iterator[PlayedSite]:
    made = PlayedSite(small_cluster())
    yield made
    made.close()


@pytest.fixture
def connect(site: PlayedSite) -> Iterator[Connect]:
    """Serve the site; return a function that connects to it from an address of loopback."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    server = HttpServer(listener, site.app.handle)
    server.start()
    port = listener.getsockname()[1]
    sockets = []

    def connected(source: str = "127.0.0.1") -> socket.socket:
        sockets.append(socket.create_connection(("127.0.0.1", port), 10, source_address=(source, 0)))
        return sockets[-1]

    yield connected
    for sock in sockets:
        sock.close()
    server.close()


def status(sock: socket.socket, target: str = "/", method: str = "GET", cookie: str = "") -> bytes:
    head = f"{method} {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: dalsegno-1={cookie}\r\n\r\n"
    sock.sendall(head.encode())
    return sock.recv(12)[9:12]


def test_silent_connections_from_many_addresses_do_not_keep_others_out(connect: Connect):
    for number in range(2 * http_server.MAX_CONNECTIONS):
        connect(f"127.0.0.{10 + number % 3}")
    assert status(connect("127.0.0.2")) == b"401"


def test_flood_from_an_address_displaces_only_its_own_connections(connect: Connect):
    quiet = connect("127.0.0.2")
    for _ in range(2 * http_server.MAX_CONNECTIONS):
        connect("127.0.0.3")
    assert status(quiet) == b"401"
    assert status(connect("127.0.0.3")) == b"401", "the flood does not lock its own address out"


@pytest.mark.cluster  # many processes or connections: too slow for the unit part
def test_peers_that_do_not_read_their_answers_do_not_keep_others_out(connect: Connect):
    request = b"GET /assets/style.css HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 400
    for number in range(http_server.MAX_CONNECTIONS):
        sock = connect(f"127.0.0.{10 + number % 2}")
        sock.setblocking(False)
        sock.send(request)
    assert status(connect("127.0.0.2")) == b"401"


def test_connection_with_a_stream_survives_a_flood(site: PlayedSite, connect: Connect):
    stream = connect("127.0.0.2")
    assert status(stream, "/stream?path=/", cookie=site.cookie()) == b"200"
    for _ in range(2 * http_server.MAX_CONNECTIONS):
        connect("127.0.0.2")
    stream.settimeout(2 * 5.0)
    while b"event: ping" not in stream.recv(65536):
        pass


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_stream_that_was_never_read_gives_its_slot_back(site: PlayedSite, method: str):
    cookie = site.cookie(WebRole.USER, 1001, "ada")
    headers = {"host": HOST, "cookie": f"dalsegno-1={cookie}"}
    for _ in range(MAX_STREAMS + 1):
        response = site.app.handle(HttpRequest(method, "/stream", {"path": "/"}, headers))
        assert response.status == 200
        response.body.close()  # type: ignore[union-attr]  # as the server does if the peer has left


def test_users_cannot_take_the_streams_of_others():
    slots = StreamSlots()
    assert sum(slots.take(ADA) for _ in range(MAX_STREAMS)) == MAX_PER_VISITOR
    assert slots.take(BEN)
    visitors = [Visitor(WebRole.USER, 2000 + number, "") for number in range(MAX_STREAMS)]
    for visitor in visitors:
        slots.take(visitor)
    assert not slots.take(Visitor(WebRole.VIEWER, 0, "root"))
    assert sum(slots.take(ROOT) for _ in range(MAX_STREAMS)) == FOR_OPERATORS


@pytest.mark.parametrize("path", ["//[", "/?" + "a=1&" * 40])
def test_stream_of_an_invalid_path_is_refused(site: PlayedSite, path: str):
    headers = {"host": HOST, "cookie": f"dalsegno-1={site.cookie()}"}
    assert site.app.handle(HttpRequest("GET", "/stream", {"path": path}, headers)).status == 400
