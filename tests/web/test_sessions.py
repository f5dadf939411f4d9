"""Login tokens, sessions and read-only links."""

import json
from pathlib import Path

import pytest

from dalsegno.cli.cluster.web import open_page
from dalsegno.web import sessions as module
from dalsegno.web.login import LoginAddress, LoginServer, role_on_cluster
from dalsegno.web.sessions import Sessions, Visitor, WebRole, csrf_of


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def made(tmp_path: Path, clock: Clock) -> Sessions:
    return Sessions(tmp_path / "sessions.json", clock)


def test_token_becomes_a_cookie_once(made: Sessions):
    token = made.issue(WebRole.USER, 1001, "ada")
    cookie = made.exchange(token)
    assert cookie and cookie != token
    assert made.visitor(cookie) == Visitor(WebRole.USER, 1001, "ada", csrf_of(cookie))
    assert made.exchange(token) is None


def test_token_is_valid_for_a_minute(made: Sessions, clock: Clock):
    token = made.issue(WebRole.USER, 1001, "ada")
    clock.now += module.TOKEN_S
    assert made.exchange(token) is None


def test_session_ends_after_twelve_hours(made: Sessions, clock: Clock):
    cookie = made.exchange(made.issue(WebRole.OPERATOR, 0, "root")) or ""
    clock.now += module.SESSION_S - 1
    assert made.visitor(cookie)
    clock.now += 1
    assert made.visitor(cookie) is None


def test_unknown_cookies_and_tokens_are_refused(made: Sessions):
    token = made.issue(WebRole.USER, 1001, "ada")
    assert made.visitor("") is None
    assert made.visitor(token) is None, "a token is not a cookie"
    assert made.exchange("") is None
    assert made.exchange(token[:-1]) is None


def test_session_survives_a_restart_of_the_server(made: Sessions, tmp_path: Path, clock: Clock):
    cookie = made.exchange(made.issue(WebRole.OPERATOR, 0, "root")) or ""
    assert Sessions(tmp_path / "sessions.json", clock).visitor(cookie) == made.visitor(cookie)


def test_saved_file_is_private_and_has_no_secret(made: Sessions, tmp_path: Path):
    cookie = made.exchange(made.issue(WebRole.OPERATOR, 0, "root")) or ""
    link = made.make_link(0, "root")
    path = tmp_path / "sessions.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert cookie not in path.read_text() and link not in path.read_text()


@pytest.mark.parametrize("text", ["", "[]", '{"sessions": 5}', '{"sessions": [{"digest": "x"}]}', "{"])
def test_damaged_file_only_ends_the_sessions(tmp_path: Path, text: str):
    path = tmp_path / "sessions.json"
    path.write_text(text)
    made = Sessions(path)
    assert made.visitor(made.exchange(made.issue(WebRole.USER, 1001, "ada")) or "")


def test_read_only_link_can_be_used_again_and_revoked(made: Sessions):
    link = made.make_link(0, "root")
    assert made.exchange(link) == link == made.exchange(link)
    visitor = made.visitor(link)
    assert visitor and visitor.role is WebRole.VIEWER
    made.end(link)
    assert made.visitor(link), "a display that logs out does not end the link of others"
    assert made.revoke(0) == 1
    assert made.exchange(link) is None and made.visitor(link) is None


def test_users_revoke_only_their_own_sessions(made: Sessions):
    ada = made.exchange(made.issue(WebRole.USER, 1001, "ada")) or ""
    bob = made.exchange(made.issue(WebRole.USER, 1002, "bob")) or ""
    assert made.revoke(1001) == 1
    assert made.visitor(ada) is None and made.visitor(bob)
    made.end(bob)
    assert made.visitor(bob) is None


def test_one_user_cannot_displace_the_sessions_of_others(made: Sessions):
    root = made.exchange(made.issue(WebRole.OPERATOR, 0, "root")) or ""
    cookies = [made.exchange(made.issue(WebRole.USER, 1001, "ada")) or "" for _ in range(100)]
    assert made.visitor(root)
    assert sum(made.visitor(cookie) is not None for cookie in cookies) == module.MAX_SESSIONS_PER_USER
    assert made.visitor(cookies[-1])


def test_tokens_are_bounded_for_each_user(made: Sessions):
    first = made.issue(WebRole.OPERATOR, 0, "root")
    tokens = [made.issue(WebRole.USER, 1001, "ada") for _ in range(100)]
    assert made.exchange(tokens[0]) is None
    assert made.exchange(tokens[-1]) and made.exchange(first)


# Roles


def test_viewer_and_strangers_cancel_nothing():
    viewer, ada = Visitor(WebRole.VIEWER, 0, "root"), Visitor(WebRole.USER, 1001, "ada")
    root = Visitor(WebRole.OPERATOR, 0, "root")
    assert [who.may_cancel(1001) for who in (viewer, ada, root)] == [False, True, True]
    assert [who.may_cancel(1002) for who in (viewer, ada, root)] == [False, False, True]
    assert [who.may_cancel(None) for who in (viewer, ada, root)] == [False, False, True]
    assert not Visitor(WebRole.VIEWER, 1001, "ada").may_cancel(1001), "a link of hers is not her"


def test_only_root_and_owners_are_operators():
    assert role_on_cluster(0, 1000) is role_on_cluster(1000, 1000) is WebRole.OPERATOR
    assert role_on_cluster(1001, 1000) is WebRole.USER


# The socket


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory, made: Sessions):
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="ds-", dir="/tmp"))  # short enough for a socket
    (folder / "run").mkdir()
    made_server = LoginServer(folder, made, "127.0.0.1:6820", lambda uid: role_on_cluster(uid, 1000))
    yield made_server
    made_server.close()
    made_server.serve()
    shutil.rmtree(folder)


def test_role_follows_from_the_uid(server: LoginServer, made: Sessions):
    root, owner, user = (server.answer(uid, {"login": True}) for uid in (0, 1000, 1001))
    assert [answer["role"] for answer in (root, owner, user)] == ["operator", "operator", "user"]
    assert made.visitor(made.exchange(user["token"]) or "")
    assert user["address"] == "127.0.0.1:6820"


def test_only_operators_make_links_and_revoke_all(server: LoginServer, made: Sessions):
    assert "error" in server.answer(1001, {"link": True})
    link = server.answer(0, {"link": True})["token"]
    assert server.answer(1001, {"revoke": True}) == {"revoked": 0}
    assert made.visitor(link)
    assert server.answer(1000, {"revoke": True}) == {"revoked": 1}


def test_operators_end_the_sessions_of_a_user(server: LoginServer, made: Sessions):
    ada, ben = (made.exchange(made.issue(WebRole.USER, uid, "x")) or "" for uid in (1001, 1002))
    assert "error" in server.answer(1002, {"revoke": True, "uid": 1001})
    assert "error" in server.answer(0, {"revoke": True, "uid": "1001"})
    assert server.answer(0, {"revoke": True, "uid": 1001}) == {"revoked": 1}
    assert made.visitor(ada) is None and made.visitor(ben)


@pytest.mark.parametrize("request_", [{}, {"login": 0}, {"login": True, "uid": 0}, {"role": "operator"}])
def test_unknown_requests_are_refused(server: LoginServer, request_: dict[str, object]):
    assert "token" not in json.dumps(server.answer(1001, request_))


def test_revoking_ends_login_tokens_that_nobody_has_used_yet(made: Sessions):
    stolen, other = made.issue(WebRole.USER, 1001, "ada"), made.issue(WebRole.USER, 1002, "ben")
    made.revoke(1001)
    assert made.exchange(stolen) is None
    assert made.exchange(other)
    stolen = made.issue(WebRole.OPERATOR, 1000, "owner")
    made.revoke(0)
    assert made.exchange(stolen) is None


def test_browser_is_started_without_the_token_in_its_arguments(tmp_path: Path):
    login = LoginAddress("secret-token", WebRole.USER, "10.240.0.2", 6820, 60.0)
    opened: list[str] = []
    page = tmp_path / "new/web-login.html"
    open_page(login, page, lambda url: not opened.append(url))  # type: ignore[func-returns-value]
    assert opened == [page.as_uri()]
    assert page.stat().st_mode & 0o777 == 0o600
    assert f"0;url={login.url()}" in page.read_text()
