"""The web application: find the answer to each request. `guard` first checks every request except those for metrics."""

from __future__ import annotations

import gzip
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qsl, quote, urlsplit

from dalsegno.errors import DalsegnoError
from dalsegno.observe.http_server import MAX_FIELDS, Handler, HttpRequest, HttpResponse
from dalsegno.web import guard
from dalsegno.web.data import read_evidence
from dalsegno.web.html import Markup, join, link, tag
from dalsegno.web.live import LivePicture
from dalsegno.web.pages import frame
from dalsegno.web.pages.cluster_map import cluster_page
from dalsegno.web.pages.frame import SECTIONS, confirm_page
from dalsegno.web.pages.goodput import goodput_page, users_page
from dalsegno.web.pages.history import drills_page, events_page
from dalsegno.web.pages.node import node_page
from dalsegno.web.pages.queue import queue_page
from dalsegno.web.pages.runs import run_page, runs_page
from dalsegno.web.requests import ActionKind, ActionRefused, WebAction, check_allowed, parse_action
from dalsegno.web.sessions import LINK_S, SESSION_S, Sessions, Visitor, WebRole
from dalsegno.web.snapshot import ClusterPicture
from dalsegno.web.stream import SlotStream, StreamSlots, follow
from dalsegno.web.view import Page, PageContext, PageData, PagePart
from dalsegno.wire.bounds import Allowances

log = logging.getLogger("web")

HTML = "text/html; charset=utf-8"
ASSETS = Path(__file__).parent / "assets"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FOREVER = (("Cache-Control", "public, max-age=31536000, immutable"),)
REFRESH_S = 5  # browsers without scripts reload the page at this interval
MIN_GZIP_BYTES = 16 << 10
# Limits on the actions of each user who is not an operator. Every action is recorded in the journal, which users must
# not be able to fill.
ACTION_BURST, ACTIONS_PER_S = 20.0, 0.2
REPORT_POLICY = ("Content-Security-Policy", "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:")
_PAGES: dict[str, Callable[[PageContext], Page]] = {
    "/": cluster_page,
    "/runs": runs_page,
    "/queue": queue_page,
    "/events": events_page,
    "/goodput": goodput_page,
    "/users": users_page,
    "/drills": drills_page,
}
PAGES = {path: name for _, path, name in SECTIONS}  # maps a path to the title of its page


class Actions(Protocol):
    """The object that carries out actions."""

    def do(self, action: WebAction, visitor: Visitor, snapshot: ClusterPicture) -> str: ...


@dataclass(frozen=True)
class WebSite:
    """The cluster that the application serves. `names` are the addresses and host names of its head node."""

    cluster: str
    cookie: str
    names: frozenset[str]
    drills: Path  # folder of drill reports, below the cluster's state folder
    evidence: Path  # folder of the evidence about nodes, also below the state folder
    login: str  # the command that prints an address to log in


class WebApp:
    """The application that answers all requests. Many threads may call it at the same time."""

    def __init__(
        self,
        site: WebSite,
        live: LivePicture,
        sessions: Sessions,
        data: PageData,
        actions: Actions,
        metrics: Handler | None = None,
    ) -> None:
        self._site, self._live, self._sessions, self._data, self._actions = site, live, sessions, data, actions
        self._metrics, self._slots = metrics, StreamSlots()
        self._allowances, self._lock = Allowances(ACTION_BURST, ACTIONS_PER_S), threading.Lock()
        self._files = {path.name: path.read_bytes() for path in ASSETS.iterdir() if path.suffix in TYPES}
        self._version = hashlib.sha256(b"".join(self._files.values())).hexdigest()[:12]

    def handle(self, request: HttpRequest) -> HttpResponse:
        """Answer one request. Requests for metrics need no session: Prometheus sends its own token."""
        if request.path == "/metrics" and self._metrics is not None:
            return self._metrics(request)
        return guard.protected(self._guarded(request))

    def _guarded(self, request: HttpRequest) -> HttpResponse:
        if not guard.host_is_ours(request, self._site.names):
            return HttpResponse(403, b"this server does not have that name\n")
        if request.path.startswith("/assets/"):
            return self._asset(request.path.removeprefix("/assets/"))
        # the icon needs no session, because browsers also request it for the login page
        if request.path == "/favicon.ico":
            return self._asset("icon.svg")
        if request.path == "/login" and request.method == "GET":
            return self._login(request)
        visitor = self._sessions.visitor(guard.cookie_of(request, self._site.cookie))
        if visitor is None:
            return self._html(401, frame.login_needed(self._site.cluster, self._version, self._site.login))
        if request.method == "POST":
            return self._post(request, visitor)
        if request.method not in ("GET", "HEAD"):
            return HttpResponse(405, b"use GET or POST\n")
        return self._get(request, visitor)

    def _asset(self, name: str) -> HttpResponse:
        if name not in self._files:
            return HttpResponse(404, b"not found\n")
        return HttpResponse(200, self._files[name], TYPES[Path(name).suffix], FOREVER)

    def _login(self, request: HttpRequest) -> HttpResponse:
        """Exchange a token for a cookie. The answer is a page that loads `/`, because a browser sends a SameSite=Strict
        cookie only with requests from our own pages."""
        cookie = self._sessions.exchange(request.query.get("token", ""))
        visitor = self._sessions.visitor(cookie) if cookie else None
        if cookie is None or visitor is None:
            return self._html(401, frame.login_needed(self._site.cluster, self._version, self._site.login))
        age_s = LINK_S if visitor.role is WebRole.VIEWER else SESSION_S
        body = join([
            Markup('<!doctype html><html lang="en"><head><meta charset="utf-8">'),
            Markup('<meta http-equiv="refresh" content="0;url=/"><title>Dal Segno</title></head><body>'),
            link("/", "Continue"), Markup("</body></html>"),
        ])  # fmt: skip
        return HttpResponse(200, body.encode(), HTML, (guard.set_cookie(self._site.cookie, cookie, age_s),))

    # Pages, which answer GET requests

    def _get(self, request: HttpRequest, visitor: Visitor) -> HttpResponse:
        if request.path == "/stream":
            return self._stream(request, visitor)
        if request.path == "/confirm":
            return self._confirm(request, visitor)
        if request.path.startswith("/drill/"):
            return self._drill(request.path.removeprefix("/drill/"))
        words = request.path.split("/")
        if len(words) == 6 and words[1] == "node" and words[3] == "evidence":
            return self._evidence(visitor, words[2], words[4], words[5])
        if not self._live.is_fresh() and request.path in PAGES:
            return HttpResponse(200, self._late_page(request, visitor), HTML)
        return self._page(request, visitor, self._live.fresh())

    def _late_page(self, request: HttpRequest, visitor: Visitor) -> Iterator[bytes]:
        """Yield the head of a page at once, so that the browser loads the style sheet while the sources are queried."""
        yield frame.head(PAGES[request.path], self._site.cluster, self._version, refresh_s=REFRESH_S).encode()
        page = self._page(request, visitor, self._live.fresh(), head=False)
        assert isinstance(page.body, bytes)
        yield page.body

    def _page(
        self, request: HttpRequest, visitor: Visitor, snapshot: ClusterPicture, *, head: bool = True
    ) -> HttpResponse:
        context = PageContext(snapshot, visitor, self._data, request.query)
        try:
            page = find_page(request.path, context)
        except DalsegnoError as error:
            return self._failed(503, "This page cannot be shown now", error)
        if page is None:
            back = tag("p", link("/", "Back to the cluster"))
            return self._html(404, frame.message_page("Not found", self._site.cluster, self._version, back))
        query = "".join(f"&{quote(key)}={quote(value)}" for key, value in request.query.items())
        stream = f"/stream?n={snapshot.number}&path={quote(request.path)}{query}"
        return self._shown(page, visitor, stream, request if head else None)

    def _shown(self, page: Page, visitor: Visitor, stream: str, request: HttpRequest | None) -> HttpResponse:
        """Return a page. Without a request, return only the part after its head."""
        cluster = self._site.cluster
        pieces: list[str] = [
            frame.head(page.title, cluster, self._version, refresh_s=REFRESH_S if stream else 0) if request else "",
            frame.start(page, cluster, visitor, stream),
            *(part.html for part in page.parts),
            frame.END,
        ]
        return self._html(page.status, "".join(pieces), request)

    def _html(self, status: int, text: str, request: HttpRequest | None = None) -> HttpResponse:
        body = text.encode()
        accepted = request.headers.get("accept-encoding", "") if request else ""
        if len(body) >= MIN_GZIP_BYTES and "gzip" in accepted:
            return HttpResponse(status, gzip.compress(body, 1), HTML, (("Content-Encoding", "gzip"),))
        return HttpResponse(status, body, HTML)

    def _failed(self, status: int, title: str, error: DalsegnoError) -> HttpResponse:
        words = [tag("p", error.what), tag("p", error.hint, class_="note") if error.hint else None]
        back = tag("p", link("/", "Back to the cluster"))
        return self._html(status, frame.message_page(title, self._site.cluster, self._version, words, back))

    def _stream(self, request: HttpRequest, visitor: Visitor) -> HttpResponse:
        """Answer with the live updates of a page, until the browser disconnects or the session ends."""
        cookie = guard.cookie_of(request, self._site.cookie)
        try:
            url = urlsplit(request.query.get("path", "/"))
            inner = dict(parse_qsl(url.query, max_num_fields=MAX_FIELDS))
        except ValueError:
            return HttpResponse(400, b"invalid path\n")
        query = {key: value for key, value in request.query.items() if key not in ("n", "path")} | inner
        number = request.query.get("n", "")
        if not self._slots.take(visitor):
            return HttpResponse(503, b"too many pages are open\n")

        def render(snapshot: ClusterPicture) -> Sequence[PagePart] | None:
            present = self._sessions.visitor(cookie)
            try:
                page = find_page(url.path, PageContext(snapshot, present, self._data, query)) if present else None
            except DalsegnoError:  # the browser reloads the page, which shows the error
                return None
            return page.parts if page else None

        known = int(number) if number.isdecimal() and len(number) < 10 else -1
        body = SlotStream(follow(self._live, render, known), self._slots, visitor)
        return HttpResponse(200, body, "text/event-stream", (("X-Accel-Buffering", "no"),))

    def _drill(self, name: str) -> HttpResponse:
        known = next((each for each in self._data.drills() if each.name == name), None)
        path = self._site.drills / f"{name}.html"
        try:
            body = path.read_bytes() if known else b""
        except OSError:
            body = b""
        if not body:
            return HttpResponse(404, b"not found\n")
        return HttpResponse(200, body, HTML, (REPORT_POLICY,))

    def _evidence(self, visitor: Visitor, node: str, bundle: str, file: str) -> HttpResponse:
        """Answer with a file of evidence. Only operators get it, because it may show the jobs of other users."""
        if not visitor.operates:
            return HttpResponse(403, b"only root and the cluster's owner may read evidence\n")
        known = node in self._live.fresh().nodes
        body = read_evidence(self._site.evidence / node, bundle, file) if known else None
        return HttpResponse(404, b"not found\n") if body is None else HttpResponse(200, body)

    # Actions of visitors

    def _confirm(self, request: HttpRequest, visitor: Visitor) -> HttpResponse:
        try:
            action = parse_action(request.query)
            check_allowed(action, visitor, self._live.fresh())
        except ActionRefused as error:
            return self._failed(403, "This cannot be done", error)
        faults = self._data.node_details(action.node).faults if action.kind is ActionKind.INJECT else ()
        return self._shown(confirm_page(action, visitor, faults), visitor, "", request)

    def _may_act_now(self, visitor: Visitor) -> bool:
        """Return whether the visitor's limit allows one more action. If it does, count the action. Operators have no
        limit."""
        with self._lock:
            allowance = self._allowances.of(visitor.uid)
            return visitor.operates or (allowance.ready_in_s() == 0.0 and allowance.spend())

    def _post(self, request: HttpRequest, visitor: Visitor) -> HttpResponse:
        form = guard.form_of(request)
        if not guard.origin_is_ours(request) or not guard.token_matches(form, visitor.csrf):
            return HttpResponse(403, b"this form does not come from a page of this session; load the page again\n")
        if request.path == "/logout":
            self._sessions.end(guard.cookie_of(request, self._site.cookie))
            gone = guard.set_cookie(self._site.cookie, "", 0)
            return HttpResponse(303, headers=(("Location", "/"), gone))
        if request.path != "/do":
            return HttpResponse(404, b"not found\n")
        try:
            action, snapshot = parse_action(form), self._live.fresh()
            check_allowed(action, visitor, snapshot)
            if not self._may_act_now(visitor):
                return HttpResponse(429, b"too many actions; try again in a minute\n")
            self._actions.do(action, visitor, snapshot)
        except ActionRefused as error:
            return self._failed(403, "This cannot be done", error)
        except DalsegnoError as error:
            return self._failed(409, "This failed", error)
        self._live.ask_soon()
        return HttpResponse(303, headers=(("Location", action.back),))


def find_page(path: str, context: PageContext) -> Page | None:
    """Return the page at this path; None if there is none."""
    if path in _PAGES:
        return _PAGES[path](context)
    words = path.split("/")
    if len(words) != 3 or words[0]:
        return None
    if words[1] == "node" and (node := context.snapshot.nodes.get(words[2])):
        return node_page(context, node)
    if words[1] == "run" and (view := context.snapshot.run(words[2])):
        return run_page(context, view)
    return None
