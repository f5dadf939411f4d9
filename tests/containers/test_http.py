"""HTTP requests: redirects, proxies and errors."""

from email.message import Message
from http.server import BaseHTTPRequestHandler

import pytest

from dalsegno.containers.credentials import server_of
from dalsegno.containers.http import Http, HttpError, Unreachable
from dalsegno.containers.registry import Challenge, parse_challenge
from tests.containers.registries import serving


def handler(answer: str, seen: list[str | None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            if answer and self.path == "/":
                self.send_response(307)
                self.send_header("Location", answer)
            else:
                self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    return Handler


def test_redirect_keeps_the_token_on_the_same_host_only():
    here: list[str | None] = []
    elsewhere: list[str | None] = []
    with serving(handler("", elsewhere)) as other, serving(handler(f"http://{other}/blob", here)) as first:
        Http({}).get(f"http://{first}/", {"Authorization": "Bearer T"}).close()
    assert (here, elsewhere) == (["Bearer T"], [None])
    with serving(handler("/blob", here)) as first:
        Http({}).get(f"http://{first}/", {"Authorization": "Bearer T"}).close()
    assert here == ["Bearer T"] * 3


def test_redirects_follow_http_only_and_drop_the_proxy_password(monkeypatch: pytest.MonkeyPatch):
    for elsewhere in ("file:///etc/passwd", "ftp://127.0.0.1:1/x"):
        with serving(handler(elsewhere, [])) as first, pytest.raises((HttpError, Unreachable)):
            Http({}).get(f"http://{first}/")
    seen: list[str | None] = []

    class Direct(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Proxy-Authorization"))
            self.send_response(307 if self.path != "/blob" else 200)
            self.send_header("Location", f"http://{self.headers['Host'].replace('registry.example', direct)}/blob")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(Direct) as direct, serving(Direct) as proxy:
        Http({"http": f"http://me:word@{proxy}"}).get("http://registry.example/").close()
    assert seen[0] and seen[1] is None


def test_http_error_and_no_answer_are_different_errors():
    class No(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(429)

        def log_message(self, *_: object) -> None: ...

    with serving(No) as address:
        with pytest.raises(HttpError, match="429 Too Many Requests") as caught:
            Http({}).get(f"http://{address}/")
        with pytest.raises(Unreachable, match="does not speak TLS") as spoken:
            Http({}).get(f"https://{address}/")
    assert caught.value.status == 429 and "ENROOT_ALLOW_HTTP=yes" in spoken.value.hint
    with pytest.raises(Unreachable, match="no answer from"):
        Http({}).get(f"http://{address}/")


def test_a_proxy_that_does_not_answer_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch):
    with serving(handler("", [])) as gone, serving(handler("", [])) as there:
        pass
    for url, named in {f"http://{there}/": f"http://me:word@{gone}", f"https://{there}/": gone}.items():
        scheme = url.partition(":")[0]
        with pytest.raises(Unreachable) as caught:
            Http({scheme: named}).get(url)
        assert f"no answer from {there} through the proxy ({scheme}_proxy={gone}): " in caught.value.what
        assert "word" not in caught.value.what and "no_proxy" in caught.value.hint
        monkeypatch.setenv(f"{scheme}_proxy", named)
    monkeypatch.setenv("no_proxy", there.partition(":")[0])
    with pytest.raises(Unreachable, match=f"no answer from {there}: "):
        Http().get(f"http://{there}/")


def test_a_challenge_is_read_and_a_token_is_preferred():
    headers = Message()
    headers["WWW-Authenticate"] = 'Basic realm="x"'
    headers["WWW-Authenticate"] = 'Bearer realm="https://a/token",service="s, t",scope="repository:a/b:pull"'
    assert parse_challenge(headers) == Challenge("bearer", "https://a/token", "s, t", "repository:a/b:pull")
    assert parse_challenge(Message()) is None


@pytest.mark.parametrize(
    ("host", "is_"),
    [("localhost", True), ("localhost:5000", True), ("127.0.0.1:80", True), ("[::1]:5000", True), ("nvcr.io", False),
     ("127.0.0.1.example", False), ("localhost.example:5000", False)],
)  # fmt: skip
def test_only_loopback_addresses_may_skip_tls(host: str, is_: bool):
    server = server_of(f"https://{host}/")
    assert server and server.is_loopback == is_
