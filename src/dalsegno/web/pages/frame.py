"""The frame of every page: head, navigation and footer. Also the pages that confirm actions and report errors. Pure."""

from __future__ import annotations

from dalsegno.web.html import Markup, join, link, tag
from dalsegno.web.requests import ActionKind, WebAction
from dalsegno.web.sessions import Visitor, WebRole
from dalsegno.web.view import Page, bare

SECTIONS = (
    ("cluster", "/", "Cluster"),
    ("runs", "/runs", "Runs"),
    ("queue", "/queue", "Queue"),
    ("events", "/events", "Events"),
    ("goodput", "/goodput", "Goodput"),
    ("users", "/users", "Users"),
    ("drills", "/drills", "Drills"),
)
ROLE_TEXT = {WebRole.VIEWER: "read-only", WebRole.USER: "user", WebRole.OPERATOR: "operator"}


def head(title: str, cluster: str, assets: str, *, refresh_s: int = 0) -> Markup:
    """Return the start of a page. Without scripts the browser loads the page again after `refresh_s`."""
    return join([
        Markup("<!doctype html>"),
        Markup('<html lang="en"><head><meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        tag("title", f"{title} · {cluster}"),
        tag("link", rel="stylesheet", href=f"/assets/style.css?{assets}"),
        tag("link", rel="icon", href=f"/assets/icon.svg?{assets}", type="image/svg+xml"),
        tag("script", src=f"/assets/app.js?{assets}", defer=True),
        tag("noscript", tag("meta", http_equiv="refresh", content=refresh_s)) if refresh_s else None,
        Markup("</head>"),
    ])  # fmt: skip


def start(page: Page, cluster: str, visitor: Visitor, stream: str) -> Markup:
    """Return the start of the body, before the parts of the page."""
    entries = [
        link(target, name, aria_current="page" if section == page.section else None)
        for section, target, name in SECTIONS
    ]
    who = tag("span", f"{visitor.user} · {ROLE_TEXT[visitor.role]}", class_="who")
    logout = tag(
        "form",
        tag("input", type="hidden", name="csrf", value=visitor.csrf),
        tag("button", "Log out", class_="quiet"),
        method="post",
        action="/logout",
    )
    bar = tag(
        "header",
        link("/", Markup(LOGO), tag("span", cluster, class_="cluster"), class_="brand"),
        tag("nav", entries, aria_label="pages"),
        tag("div", tag("span", id="live", class_="live", role="status"), who,
            logout if visitor.role is not WebRole.VIEWER else None, class_="side"),
        class_="bar",
    )  # fmt: skip
    skip = link("#main", "Skip to content", class_="skip")
    return join([
        Markup("<body>"), skip, bar,
        Markup(f'<main id="main" data-stream="{tag_safe(stream)}">'), tag("h1", page.title, class_="hidden"),
    ])  # fmt: skip


def tag_safe(text: str) -> str:
    return join([text])


END = Markup("</main></body></html>\n")
LOGO = (
    '<svg viewBox="0 0 24 24" class="logo" aria-hidden="true"><path d="M7 17.5c1.6 2 5.8 2.4 7.6.3 2.3-2.7-.6-5-3-6.3'
    '-2.6-1.4-4.7-3.6-2.6-6 1.7-2 5.4-1.6 7.2.3M5 19 19 5"/><circle cx="6.5" cy="9.5" r="1.3"/>'
    '<circle cx="17.5" cy="14.5" r="1.3"/></svg>'
)


def message_page(title: str, cluster: str, assets: str, *children: object) -> Markup:
    """Return a page with a short message and no navigation, for visitors without a session and for errors."""
    box = tag("main", Markup(LOGO), tag("h1", title), children, id="main", class_="message")
    return join([head(title, cluster, assets), Markup("<body>"), box, Markup("</body></html>\n")])


def login_needed(cluster: str, assets: str, command: str) -> Markup:
    return message_page(
        "You are not logged in",
        cluster,
        assets,
        tag("p", "Run this command on the machine of the cluster. Its address logs you in once:"),
        tag("pre", tag("code", command)),
        tag("p", "An address can be used once, within a minute. A session ends after twelve hours.", class_="note"),
        tag(
            "p", "If your address was used before you opened it, end all sessions: dalsegno web --revoke", class_="note"
        ),
    )


def confirm_page(action: WebAction, visitor: Visitor, faults: tuple[str, ...] = ()) -> Page:
    """Return the page that asks for confirmation. Scripts show its form as a dialog."""
    hidden = {"csrf": visitor.csrf, "do": action.kind.value, "node": action.node, "run": action.run}
    if action.job:
        hidden["job"] = str(action.job)
    form = tag(
        "form",
        tag("h2", action.question),
        tag("p", action.effect, class_="note"),
        [tag("input", type="hidden", name=name, value=value) for name, value in hidden.items() if value],
        _fields(action, faults),
        tag(
            "p",
            tag("button", action.verb, class_="primary"),
            " ",
            link(action.back, "Back", class_="button", data_close=True),
            class_="buttons",
        ),
        method="post",
        action="/do",
        class_="confirm",
    )
    return Page(action.question, "", (bare("confirm", form),))


def _fields(action: WebAction, faults: tuple[str, ...]) -> Markup | None:
    if action.kind is ActionKind.DRAIN:
        field = tag("input", name="reason", maxlength=100, placeholder="for example: fan is loud", autofocus=True)
        return tag("label", "Reason", field)
    if action.kind is ActionKind.INJECT:
        options = [tag("option", name, value=name) for name in faults]
        code = tag("input", name="code", inputmode="numeric", pattern="[0-9]*", maxlength=4, placeholder="79")
        return tag(
            "div",
            tag("label", "Fault", tag("select", options, name="fault")),
            tag("label", "Xid", code, class_="xid-code"),
        )
    return None
