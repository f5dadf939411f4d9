"""Requests to the web application: who gets what, and what is refused."""

from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from dalsegno.web.requests import ActionKind
from dalsegno.web.sessions import WebRole, csrf_of
from tests.web.played import HOST, PlayedSite, job, small_cluster

PAGES = ("/", "/runs", "/run/llama-k3f9x", "/node/gpu-3", "/queue", "/events", "/goodput", "/users", "/drills")


@pytest.fixture(scope="module")
def site() -> Iterator[PlayedSite]:
    made = PlayedSite(small_cluster())
    yield made
    made.close()


@pytest.fixture
def root(site: PlayedSite) -> str:
    site.actions.done.clear()
    return site.cookie()


@pytest.fixture
def ada(site: PlayedSite) -> str:
    site.actions.done.clear()
    return site.cookie(WebRole.USER, 1001, "ada")


@pytest.fixture
def display(site: PlayedSite) -> str:
    return site.sessions.make_link(0, "root")


@pytest.mark.parametrize("path", PAGES)
def test_page_without_a_session_is_refused_with_the_command_to_run(site: PlayedSite, path: str):
    response = site.get(path)
    assert response.status == 401
    assert isinstance(response.body, bytes) and b"dalsegno web --cluster played" in response.body
    assert b"gpu-3" not in response.body


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("who", ["root", "ada", "display"])
def test_everybody_with_a_session_sees_every_page(
    site: PlayedSite, path: str, who: str, request: pytest.FixtureRequest
):
    response = site.get(path, request.getfixturevalue(who))
    assert response.status == 200
    headers = dict(response.headers)
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store" and headers["X-Frame-Options"] == "DENY"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:6820", "", "127.0.0.1.evil.example", "10.9.9.9"])
def test_wrong_host_is_refused(site: PlayedSite, root: str, host: str):
    assert site.get("/", root, host=host).status == 403
    assert (
        site.get("/login", query={"token": site.sessions.issue(WebRole.OPERATOR, 0, "root")}, host=host).status == 403
    )
    assert site.post("/do", root, f"do=pause&csrf={csrf_of(root)}", host=host, origin=f"http://{host}").status == 403
    assert site.actions.done == []


@pytest.mark.parametrize("host", ["127.0.0.1:6820", "localhost:9999", "[::1]:6820", "head:6820", "127.0.0.1"])
def test_own_names_and_tunnels_are_accepted(site: PlayedSite, root: str, host: str):
    assert site.get("/", root, host=host).status == 200


def test_login_sets_a_strict_cookie_and_uses_up_the_token(site: PlayedSite):
    token = site.sessions.issue(WebRole.USER, 1001, "ada")
    response = site.get("/login", query={"token": token})
    cookie = dict(response.headers)["Set-Cookie"]
    assert response.status == 200
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and token not in cookie
    value = cookie.partition("=")[2].partition(";")[0]
    assert site.get("/", value).status == 200
    assert site.get("/login", query={"token": token}).status == 401


@pytest.mark.parametrize(
    "path", ["/nothing", "/node/none", "/run/none", "/node/gpu-3/x", "/drill/../x", "//", "/node/"]
)
def test_unknown_pages_are_not_found(site: PlayedSite, root: str, path: str):
    assert site.get(path, root).status == 404


@pytest.mark.parametrize("name", ["../app.py", "app.js/..", "nothing.js", "", "%2e%2e/app.py"])
def test_only_assets_are_served_as_assets(site: PlayedSite, name: str):
    assert site.get(f"/assets/{name}").status == 404


def test_assets_come_from_the_package_and_are_kept_by_the_browser(site: PlayedSite):
    for name in ("app.js", "style.css", "icon.svg"):
        response = site.get(f"/assets/{name}")
        assert response.status == 200 and "immutable" in dict(response.headers)["Cache-Control"]
        assert isinstance(response.body, bytes) and b"https://" not in response.body.replace(b"http://www.w3.org", b"")


def test_browser_finds_the_icon_without_a_session(site: PlayedSite):
    icon = site.get("/favicon.ico")
    assert icon.content_type == "image/svg+xml" and isinstance(icon.body, bytes)
    assert ElementTree.fromstring(icon.body).tag == "{http://www.w3.org/2000/svg}svg", "browsers show no other"


def test_pages_load_nothing_from_elsewhere(site: PlayedSite, root: str):
    for path in PAGES:
        text = site.text(path, root)
        assert "http://" not in text and "https://" not in text
        assert "style=" not in text and "<style" not in text and "onclick" not in text


# HTML in names


def test_html_in_names_is_shown_as_text(site: PlayedSite, root: str):
    text = site.text("/queue", root)
    assert "<img" not in text
    assert "sweep &lt;img src=x&gt;" in text


def test_hostile_texts_of_slurm_cannot_become_elements():
    from dataclasses import replace

    from dalsegno.web.snapshot import SlurmPart

    evil = "\"><script>alert(1)</script>'\u202e\x1b[31m\n"
    sources = small_cluster()
    assert isinstance(sources.slurm_part, SlurmPart)
    nodes = [replace(each, reason=evil, partitions=(evil,)) for each in sources.slurm_part.nodes]
    sources.slurm_part = SlurmPart(tuple(nodes), (job(7, evil, evil, nodes=("gpu-1",), reason=evil, partition=evil),))
    site = PlayedSite(sources)
    try:
        cookie = site.cookie()
        for path in ("/", "/queue", "/node/gpu-1", "/users"):
            text = site.text(path, cookie)
            assert "<script>alert" not in text and "\u202e" not in text and "\x1b" not in text
    finally:
        site.close()


# Actions


def form(cookie: str, fields: str) -> str:
    return f"{fields}&csrf={csrf_of(cookie)}"


def test_operator_can_do_everything(site: PlayedSite, root: str):
    asked = [
        "do=drain&node=gpu-3&reason=fan", "do=undrain&node=gpu-3", "do=cancel&run=llama-k3f9x", "do=cancel&job=103",
        "do=pause", "do=resume", "do=inject&node=gpu-3&fault=xid&code=79",
    ]  # fmt: skip
    for fields in asked:
        response = site.post("/do", root, form(root, fields))
        assert response.status == 303, (fields, response.body)
    done = [action for action, _ in site.actions.done]
    assert [action.kind for action in done] == [
        ActionKind.DRAIN, ActionKind.UNDRAIN, ActionKind.CANCEL, ActionKind.CANCEL, ActionKind.PAUSE,
        ActionKind.RESUME, ActionKind.INJECT,
    ]  # fmt: skip
    assert (done[0].node, done[0].reason, done[3].job, done[6].fault, done[6].code) == ("gpu-3", "fan", 103, "xid", 79)


def test_user_cancels_own_runs_and_jobs_only(site: PlayedSite, ada: str):
    assert site.post("/do", ada, form(ada, "do=cancel&run=llama-k3f9x")).status == 303
    assert site.post("/do", ada, form(ada, "do=cancel&job=105")).status == 303
    refused = (
        "do=cancel&run=vit-q8m2z",
        "do=cancel&job=103",
        "do=drain&node=gpu-3",
        "do=pause",
        "do=inject&node=gpu-3",
    )
    assert [site.post("/do", ada, form(ada, fields)).status for fields in refused] == [403] * 5
    assert len(site.actions.done) == 2


def test_user_cannot_fill_the_journal_with_actions():
    site = PlayedSite(small_cluster())
    try:
        ada, root = site.cookie(WebRole.USER, 1001, "ada"), site.cookie()
        answers = [site.post("/do", ada, form(ada, "do=cancel&job=105")).status for _ in range(60)]
        assert answers[:20] == [303] * 20 and set(answers) == {303, 429}
        assert len(site.actions.done) == answers.count(303) < 40
        for _ in range(30):
            assert site.post("/do", root, form(root, "do=drain&node=gpu-3")).status == 303, "operators are not limited"
    finally:
        site.close()


def test_read_only_session_can_do_nothing(site: PlayedSite, root: str, display: str):
    asked = ("do=cancel&run=llama-k3f9x", "do=cancel&job=105", "do=drain&node=gpu-3", "do=pause")
    assert [site.post("/do", display, form(display, fields)).status for fields in asked] == [403] * 4
    assert site.get("/confirm", display, {"do": "drain", "node": "gpu-3"}).status == 403
    assert site.actions.done == []


def test_buttons_are_shown_only_to_those_who_may_press_them(site: PlayedSite, root: str, ada: str, display: str):
    assert "do=drain" in site.text("/node/gpu-3", root)
    assert "do=drain" not in site.text("/node/gpu-3", ada) + site.text("/node/gpu-3", display)
    runs = site.text("/runs", ada)
    assert "run=llama-k3f9x" in runs and "run=vit-q8m2z" not in runs
    assert "/confirm" not in site.text("/runs", display) + site.text("/", display)


def test_action_needs_the_form_token_and_our_origin(site: PlayedSite, root: str):
    good = form(root, "do=pause")
    assert site.post("/do", root, "do=pause").status == 403
    assert site.post("/do", root, "do=pause&csrf=0").status == 403
    for origin in ("http://evil.example", "null", "", "http://127.0.0.1:1", f"https://{HOST}"):
        assert site.post("/do", root, good, origin=origin).status == 403
    assert site.post("/do", root, good, sec_fetch_site="cross-site").status == 403
    assert site.post("/do", root, good, content_type="text/plain").status == 403
    assert site.post("/do", "", good).status == 401
    assert site.get("/do", root, {"do": "pause", "csrf": csrf_of(root)}).status == 404
    assert site.actions.done == []


def test_token_of_another_session_is_refused(site: PlayedSite, root: str, ada: str):
    assert site.post("/do", ada, f"do=cancel&run=llama-k3f9x&csrf={csrf_of(root)}").status == 403


@pytest.mark.parametrize(
    "fields",
    ["", "do=drain", "do=drain&node=", "do=drain&node=none", "do=nothing&node=gpu-3", "do=cancel", "do=cancel&job=x",
     "do=cancel&run=llama-k3f9x&job=101", "do=drain&node=gpu-3%20State=DOWN", "do=cancel&run=../x",
     "do=cancel&job=999"],
)  # fmt: skip
def test_malformed_actions_are_refused(site: PlayedSite, root: str, fields: str):
    assert site.post("/do", root, form(root, fields)).status == 403
    assert site.actions.done == []


def test_every_action_asks_first(site: PlayedSite, root: str):
    for query in ({"do": "drain", "node": "gpu-3"}, {"do": "cancel", "run": "llama-k3f9x"}, {"do": "pause"}):
        text = site.text("/confirm", root, **query)
        assert '<form method="post" action="/do"' in text and csrf_of(root) in text
    assert site.actions.done == []
    assert "power-off" in site.text("/confirm", root, do="inject", node="gpu-3")


def test_resume_is_offered_only_for_nodes_out_of_service(site: PlayedSite, root: str):
    assert "do=undrain" not in site.text("/node/gpu-1", root)
    assert "do=undrain" in site.text("/node/gpu-9", root)


def test_goodput_counts_all_runs(site: PlayedSite, root: str):
    assert "3 runs" in site.text("/goodput", root)


def test_logout_ends_the_session(site: PlayedSite, root: str):
    assert site.post("/logout", root, "csrf=0").status == 403
    assert site.get("/", root).status == 200
    assert site.post("/logout", root, f"csrf={csrf_of(root)}").status == 303
    assert site.get("/", root).status == 401


# Evidence and reports


def test_only_operators_read_evidence_and_only_listed_files(site: PlayedSite, root: str, ada: str):
    bundle = site.folder / "evidence/gpu-3/20260101T000000Z"
    bundle.mkdir(parents=True, exist_ok=True)
    (bundle / "dmesg.txt").write_text("<b>hot</b>")
    (site.folder / "evidence/secret.txt").write_text("secret")
    path = "/node/gpu-3/evidence/20260101T000000Z/dmesg.txt"
    response = site.get(path, root)
    assert (response.status, response.body) == (200, b"<b>hot</b>")
    assert response.content_type.startswith("text/plain")
    assert site.get(path, ada).status == 403
    for other in (
        "/node/gpu-3/evidence/../secret.txt",
        "/node/gpu-3/evidence/20260101T000000Z/..",
        "/node/../evidence/a/b",
    ):
        assert site.get(other, root).status == 404


def test_drill_reports_run_no_scripts(site: PlayedSite, root: str):
    (site.folder / "drills").mkdir(exist_ok=True)
    (site.folder / "drills/20261117T190000Z-7.html").write_text("<script>alert(1)</script>")
    response = site.get("/drill/20261117T190000Z-7", root)
    assert response.status == 200
    assert dict(response.headers)["Content-Security-Policy"].startswith("sandbox;")
    assert site.get("/drill/other", root).status == 404


def test_large_pages_are_compressed_for_browsers_that_accept_it(site: PlayedSite, root: str):
    response = site.get("/", root, accept_encoding="gzip, br")
    assert dict(response.headers)["Content-Encoding"] == "gzip"
    assert isinstance(response.body, bytes) and len(response.body) < 10_000
