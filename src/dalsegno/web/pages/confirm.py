"""The page that asks for confirmation before every action. Pure."""

from __future__ import annotations

from dalsegno.web.html import Markup, link, tag
from dalsegno.web.requests import ActionKind, WebAction
from dalsegno.web.sessions import Visitor
from dalsegno.web.view import Page, bare


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
