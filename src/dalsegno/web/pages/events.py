"""Events as they happen, newest first. Pure."""

from __future__ import annotations

from dalsegno.web.html import link, moment, table, tag
from dalsegno.web.pages.cluster_map import node_word
from dalsegno.web.pages.labels import event_chip
from dalsegno.web.view import Page, PageContext, section


def events_page(context: PageContext) -> Page:
    """Return the last events; `?node=NAME` shows those of one node."""
    wanted = context.query.get("node", "")
    events = [event for event in context.snapshot.events if wanted in ("", event.node)]
    rows = [
        [
            tag("td", moment(event.at)), event_chip(event), node_word(event.node, context.snapshot.nodes),
            tag("td", event.text, class_="text"),
        ]
        for event in reversed(events)
    ]  # fmt: skip
    note = tag("span", f"only of {wanted}; ", link("/events", "all")) if wanted else "newest first"
    body = table(["When", "Kind", "Node", "What"], rows, empty="No events yet.", class_="wide")
    return Page("Events", "events", (section("events", "Events", body, note=note),))
