"""The HTTP side of metrics: paths, the token and its file, and the address."""

from __future__ import annotations

import os
import socket

import pytest

from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.observe.collector import Collector
from dalsegno.observe.http_server import HttpRequest
from dalsegno.observe.metrics_endpoint import ListenAddress, MetricsEndpoint, read_token
from tests.observe.test_collector import PlayedSource

TOKEN = "a-token-that-is-long-enough"


def status(endpoint: MetricsEndpoint, path: str, authorization: str = "", method: str = "GET") -> int:
    headers = {"authorization": authorization} if authorization else {}
    return endpoint(HttpRequest(method, path, headers=headers)).status


def test_metrics_need_the_token():
    endpoint = MetricsEndpoint(Collector([]), TOKEN)
    answers = {
        given: status(endpoint, "/metrics", given)
        for given in ("", f"Bearer {TOKEN}", f"bearer {TOKEN}", "Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer ")
    }
    assert [given for given, code in answers.items() if code == 200] == [f"Bearer {TOKEN}", f"bearer {TOKEN}"]
    assert {code for code in answers.values()} == {200, 401}


def test_open_metrics_need_no_token():
    response = MetricsEndpoint(Collector([]), None)(HttpRequest("GET", "/metrics"))
    assert response.status == 200 and response.content_type == "text/plain; version=0.0.4; charset=utf-8"


def test_other_paths_and_methods_are_refused():
    endpoint = MetricsEndpoint(Collector([]), None)
    assert status(endpoint, "/nothing") == 404 and status(endpoint, "/metrics", method="POST") == 405
    assert status(endpoint, "/") == 200


def test_health_names_the_failing_sources():
    good, bad = PlayedSource("good"), PlayedSource("bad")
    collector = Collector([good, bad])
    endpoint = MetricsEndpoint(collector, TOKEN)
    assert status(endpoint, "/healthz") == 503, "before the first collection"
    collector.collect()
    assert endpoint(HttpRequest("GET", "/healthz")).body == b"ok\n"
    bad.error = DalsegnoError("gone")
    collector.collect()
    answer = endpoint(HttpRequest("GET", "/healthz"))
    assert (answer.status, answer.body) == (200, b"failing: bad\n")


def test_missing_token_file_is_written_for_its_owner_only(tmp_path):
    path = tmp_path / "token"
    token = read_token(path)
    assert len(token) >= 32 and path.stat().st_mode & 0o777 == 0o600
    assert read_token(path) == token


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_token_file_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)
    with pytest.raises(DalsegnoError, match="other users") as refused:
        read_token(path)
    assert refused.value.hint == f"chmod 600 {path}"


def test_short_token_link_and_pipe_are_refused(tmp_path):
    short, link, pipe = (tmp_path / name for name in ("short", "link", "pipe"))
    short.write_text("abc\n")
    short.chmod(0o600)
    link.symlink_to(short)
    os.mkfifo(pipe, 0o600)
    for path in (short, link, pipe):
        with pytest.raises(DalsegnoError):
            read_token(path)


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:9341", "127.0.0.1", 9341, True),
        ("[::1]:80", "::1", 80, True),
        (":9341", "", 9341, False),
        ("10.0.0.1:1", "10.0.0.1", 1, False),
    ],
)
def test_address_is_parsed(text, host, port, loopback):
    address = ListenAddress.parse(text)
    assert (address.host, address.port, address.loopback, str(address)) == (host, port, loopback, text)


@pytest.mark.parametrize("text", ["", "9341", "host:", "host:http", "host:70000", "http://host:1"])
def test_invalid_address_is_a_usage_error(text):
    with pytest.raises(UsageError):
        ListenAddress.parse(text)


def test_port_in_use_is_reported_with_a_hint():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = ListenAddress("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(DalsegnoError, match="the port is in use") as refused:
            address.open()
    assert "--listen" in refused.value.hint
