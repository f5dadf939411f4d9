"""The HTTP server: requests, limits, streams."""

from __future__ import annotations

import socket
from http.client import HTTPConnection

import pytest

from dalsegno.observe.http_server import HttpRequest, HttpResponse, HttpServer


@pytest.fixture
def server():
    """Start a server that answers with what it was asked; return a function that connects to it."""

    def answer(request: HttpRequest) -> HttpResponse:
        if request.path == "/fails":
            raise RuntimeError("a bug")
        if request.path == "/stream":
            return HttpResponse(body=iter([b"a", b"b"]), content_type="text/event-stream")
        return HttpResponse(body=f"{request.method} {request.path} {dict(request.query)} {request.body!r}".encode())

    listener = socket.create_server(("127.0.0.1", 0))
    serving = HttpServer(listener, answer)
    port = listener.getsockname()[1]
    serving.start()
    yield lambda: socket.create_connection(("127.0.0.1", port), timeout=10)
    serving.close()


def ask(connect, data: bytes) -> bytes:
    with connect() as sock:
        sock.sendall(data)
        received = b""
        while more := sock.recv(65536):
            received += more
        return received


def test_request_has_method_path_query_and_body(server):
    answer = ask(server, b"POST /a?x=1&y= HTTP/1.1\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"POST /a {'x': '1', 'y': ''} b'hi'")


def test_connection_takes_several_requests(server):
    port = server().getpeername()[1]
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    for path in ("/one", "/two"):
        connection.request("GET", path)
        assert path.encode() in connection.getresponse().read()
    connection.close()


def test_stream_ends_with_the_connection(server):
    assert ask(server, b"GET /stream HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\nab")


def test_failing_handler_answers_500_without_its_message(server):
    answer = ask(server, b"GET /fails HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 500 ") and b"a bug" not in answer


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET http://other/ HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nA: 1\r\nA: 2\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", b"413"),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 20_000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nA: \xff\r\n\r\n", b"400"),
        (b"GET //[ HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /?" + b"a=1&" * 40 + b" HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /\x1b]0;title HTTP/1.1\r\n\r\n", b"400"),
    ],
)
def test_bad_request_is_refused(server, data, status):
    assert ask(server, data).startswith(b"HTTP/1.1 " + status)
