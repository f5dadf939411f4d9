"""A real registry (docker-registry) on loopback, one that requires tokens, and a proxy that changes answers."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.waiting import eventually

SERVICE, ISSUER = "tests", "the test's token server"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def registry(folder: Path, auth: str = "", prefix: Sequence[str] = ()) -> Iterator[str]:
    """Run a registry and yield its host and port. Several may serve the same folder. `prefix` starts it elsewhere, such
    as in a network namespace."""
    address = f"127.0.0.1:{free_port()}"
    config = folder / f"{address}.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}\nhttp: {{addr: '{address}'}}\n{auth}"
    )
    with open(folder / "log", "ab") as log:
        process = subprocess.Popen([*prefix, "docker-registry", "serve", config], stdout=log, stderr=log)
    try:
        _wait_for(address, prefix)
        yield address
    finally:
        process.kill()
        process.wait()


def _wait_for(address: str, prefix: Sequence[str]) -> None:
    if prefix:
        argv = [*prefix, "curl", "--silent", "--fail", f"http://{address}/v2/"]
        eventually(lambda: subprocess.run(argv, capture_output=True, timeout=10).returncode == 0)
        return
    host, port = address.split(":")
    eventually(lambda: socket.create_connection((host, int(port)), 10)).close()


def push(layout: Path, tag: str, address: str, name: str, prefix: Sequence[str] = ()) -> None:
    """Push an image with skopeo: every architecture, with unchanged digests."""
    argv = [
        *prefix,
        "skopeo",
        "--insecure-policy",
        "copy",
        "-q",
        "--all",
        "--dest-tls-verify=false",
        "--preserve-digests",
    ]
    done = subprocess.run([*argv, f"oci:{layout}:{tag}", f"docker://{address}/{name}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler], host: str = "127.0.0.1") -> Iterator[str]:
    server = ThreadingHTTPServer((host, 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@dataclass
class Meddler:
    """Forwards requests to a registry, records them, and may change the answers."""

    behind: str
    seen: list[tuple[str, str]] = field(default_factory=list)  # path and requested Range
    meddle: Callable[[str, bytes], bytes | None] = lambda path, body: body  # None: do not answer
    cut: int = 0  # number of further blobs that are cut off in the middle
    stall: bool = False  # whether the transfer of a blob stalls in the middle

    def blobs(self) -> list[str]:
        return [path for path, _ in self.seen if "/blobs/" in path]

    def handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *_: object) -> None: ...

        return Handler

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        wanted = to.headers.get("Range", "")
        self.seen.append((to.path, wanted))
        status, headers, body = self._ask(to.path, {key: value for key, value in to.headers.items() if key != "Host"})
        changed = self.meddle(to.path, body)
        if changed is None:
            threading.Event().wait(30)
            return
        to.send_response(status)
        for key, value in headers:
            if key.lower() not in ("transfer-encoding", "connection", "content-length"):
                to.send_header(key, value)
        to.send_header("Content-Length", str(len(changed)))
        to.end_headers()
        if "/blobs/" in to.path and self.cut > 0 and len(changed) > 1000:
            self.cut -= 1
            to.wfile.write(changed[: len(changed) // 2])
            to.wfile.flush()
            to.connection.shutdown(socket.SHUT_RDWR)
            to.close_connection = True
            return
        if "/blobs/" in to.path and self.stall and len(changed) > 1000:
            to.wfile.write(changed[: len(changed) // 2])
            threading.Event().wait(30)
            return
        to.wfile.write(changed)

    def _ask(self, path: str, headers: dict[str, str]) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.behind, timeout=60)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, answer.getheaders(), body


class Tokens:
    """A token server that checks passwords and signs tokens for docker-registry."""

    def __init__(self, folder: Path, passwords: dict[str, str]) -> None:
        self.folder, self.passwords = folder, passwords
        self.given = 0
        request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=tokens", "-days", "2"]
        done = subprocess.run([*request, "-keyout", "key.pem", "-out", "cert.pem"], cwd=folder, capture_output=True)
        assert done.returncode == 0, done.stderr

    def auth(self, address: str) -> str:
        """Return the authentication settings of the registry."""
        words = f"realm: 'http://{address}/token', service: {SERVICE}, issuer: \"{ISSUER}\""
        return f"auth: {{token: {{{words}, rootcertbundle: {self.folder}/cert.pem}}}}\n"

    def handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *_: object) -> None: ...

        return Handler

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        scheme, _, word = to.headers.get("Authorization", "").partition(" ")
        user, _, password = base64.b64decode(word).decode().partition(":") if scheme == "Basic" else ("", "", "")
        if self.passwords.get(user) != password:
            to.send_error(401)
            return
        kind, name, actions = parse_qs(urlsplit(to.path).query)["scope"][0].split(":")
        body = json.dumps({"token": self._token(user, kind, name, actions.split(","))}).encode()
        self.given += 1
        to.send_response(200)
        to.send_header("Content-Length", str(len(body)))
        to.end_headers()
        to.wfile.write(body)

    def _token(self, user: str, kind: str, name: str, actions: list[str]) -> str:
        pem = (self.folder / "cert.pem").read_text()
        der = "".join(line for line in pem.splitlines() if "CERTIFICATE" not in line)
        now = int(time.time())
        claims = {
            "iss": ISSUER, "sub": user, "aud": SERVICE, "iat": now, "nbf": now - 10, "exp": now + 60, "jti": str(now),
            "access": [{"type": kind, "name": name, "actions": actions}],
        }  # fmt: skip
        signed = f"{_b64({'typ': 'JWT', 'alg': 'RS256', 'x5c': [der]})}.{_b64(claims)}"
        sign = ["openssl", "dgst", "-sha256", "-sign", "key.pem"]
        made = subprocess.run(sign, input=signed.encode(), cwd=self.folder, capture_output=True, check=True).stdout
        return f"{signed}.{base64.urlsafe_b64encode(made).decode().rstrip('=')}"


def _b64(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")
