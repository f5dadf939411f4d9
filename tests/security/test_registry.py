"""Hostile registries on loopback get no passwords and tokens of other servers."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.conftest import Command, CommandResult
from tests.containers.registries import serving

SECRET = "the-password"
Headers = dict[str, str]


@dataclass
class Server:
    """Answers with a function, and records the requests."""

    answer: Callable[[str, str], tuple[int, Headers, bytes]]  # (path, Authorization)
    address: str = ""
    seen: list[tuple[str, str]] = field(default_factory=list)  # (path, Authorization)

    def take(self, to: BaseHTTPRequestHandler) -> None:
        authorization = to.headers.get("Authorization", "")
        self.seen.append((to.path, authorization))
        status, headers, body = self.answer(to.path, authorization)
        to.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            to.send_header(key, value)
        to.end_headers()
        to.wfile.write(body)

    @property
    def authorizations(self) -> list[str]:
        return [authorization for _, authorization in self.seen if authorization]


@contextmanager
def server(answer: Callable[[str, str], tuple[int, Headers, bytes]]) -> Iterator[Server]:
    made = Server(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.take(self)

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    with serving(Handler) as made.address:
        yield made


def challenge(text: str) -> Callable[[str, str], tuple[int, Headers, bytes]]:
    return lambda path, authorization: (401, {"WWW-Authenticate": text}, b"")


def tokens(path: str, authorization: str) -> tuple[int, Headers, bytes]:
    """Answer like a token server that gives a token for every scope if the password is right."""
    if authorization != basic("ann", SECRET):
        return 401, {}, b""
    return 200, {}, json.dumps({"token": "opens-everything"}).encode()


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


Import = Callable[..., CommandResult]


@pytest.fixture
def import_from(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Import:
    """Return a function that runs `dalsegno image import` as a user with passwords for these machines."""
    for name in set(os.environ) - {"PATH"}:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DALSEGNO_IMAGES", str(tmp_path / "images"))

    def run(registry: str, *machines: str) -> CommandResult:
        write_passwords(tmp_path, machines)
        return command("image", "import", "--own", f"{registry}#team/app:v1")

    return run


def write_passwords(home: Path, machines: Sequence[str]) -> None:
    folder = home / ".config/enroot"
    folder.mkdir(parents=True)
    lines = [f"machine {each} login ann password {SECRET}\n" for each in machines]
    (folder / ".credentials").write_text("".join(lines))
    auths = {each: {"auth": basic("ann", SECRET).split()[1]} for each in machines}
    (home / ".docker").mkdir()
    (home / ".docker/config.json").write_text(json.dumps({"auths": auths}))


def test_basic_challenge_with_another_realm_gets_no_password(import_from: Import):
    with server(tokens) as victim:
        text = f'Basic realm="http://localhost:{victim.address.split(":")[1]}/"'
        with server(challenge(text)) as hostile:
            done = import_from(hostile.address, victim.address.replace("127.0.0.1", "localhost"))
    assert done.returncode == 1 and "requires a user and a password" in done.stderr
    assert hostile.seen and hostile.authorizations == [] and victim.seen == []


def test_bearer_challenge_with_another_realm_gets_no_token(import_from: Import):
    with server(tokens) as victim:
        realm = victim.address.replace("127.0.0.1", "localhost")
        text = f'Bearer realm="http://{realm}/token",service="victim",scope="repository:secret/model:pull,push"'
        with server(challenge(text)) as hostile:
            done = import_from(hostile.address, realm)
    assert done.returncode == 1 and SECRET not in done.stderr
    assert victim.seen and victim.authorizations == []
    assert hostile.seen and hostile.authorizations == []


def test_realm_with_a_user_in_its_url_is_refused(import_from: Import):
    with server(tokens) as hostile:
        hostile.answer = challenge(f'Bearer realm="http://auth.docker.io@{hostile.address}/token"')
        done = import_from(hostile.address, "auth.docker.io", hostile.address)
    assert done.returncode == 1 and "not a plain URL" in done.stderr
    assert hostile.seen and hostile.authorizations == []


def test_token_request_covers_only_the_wanted_repository(import_from: Import):
    with server(tokens) as registry:
        realm = f'Bearer realm="http://{registry.address}/token",scope="repository:secret/model:pull,push"'

        def answer(path: str, authorization: str) -> tuple[int, Headers, bytes]:
            return tokens(path, authorization) if path.startswith("/token") else challenge(realm)(path, authorization)

        registry.answer = answer
        import_from(registry.address, registry.address)
    asked = [path for path, _ in registry.seen if path.startswith("/token")]
    assert asked and all("scope=repository%3Ateam%2Fapp%3Apull" in path for path in asked)
    assert "secret" not in "".join(asked)


def test_challenge_of_a_server_behind_a_redirect_is_not_answered(import_from: Import):
    """The registry is honest and gets the password; the server it redirects to asks for it too."""
    with server(tokens) as hostile:
        hostile.answer = challenge(f'Bearer realm="http://{hostile.address}/token"')

        def redirect(path: str, authorization: str) -> tuple[int, Headers, bytes]:
            return 307, {"Location": f"http://{hostile.address}{path}"}, b""

        with server(redirect) as registry:
            done = import_from(registry.address, registry.address)
    assert done.returncode == 1 and f"redirects to {hostile.address}, which answered 401" in done.stderr
    assert hostile.seen and hostile.authorizations == []


def test_password_and_token_are_not_sent_to_a_redirect_target(import_from: Import):
    with server(lambda path, authorization: (200, {}, b"{}")) as hostile:

        def answer(path: str, authorization: str) -> tuple[int, Headers, bytes]:
            if not authorization:
                return challenge('Basic realm="registry"')(path, authorization)
            return 307, {"Location": f"http://{hostile.address}{path}"}, b""

        with server(answer) as registry:
            import_from(registry.address, registry.address)
    assert registry.authorizations == [basic("ann", SECRET)]
    assert hostile.seen and hostile.authorizations == []


def test_password_of_another_port_is_not_sent_without_tls(import_from: Import):
    """Any user of a host can listen on one of its ports."""
    with server(challenge('Basic realm="registry"')) as hostile:
        done = import_from(hostile.address, "127.0.0.1", "127.0.0.1:5000")
    assert done.returncode == 1 and hostile.seen and hostile.authorizations == []


def test_control_characters_of_a_registry_do_not_reach_the_terminal(import_from: Import):
    with server(challenge('Bearer realm="http://\x1b]0;owned\x07/"')) as hostile:
        done = import_from(hostile.address)
    assert done.returncode == 1 and "\x1b" not in done.stderr and "\x07" not in done.stderr
