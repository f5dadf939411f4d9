"""The last events, and saved drill reports, newest first."""

from __future__ import annotations

from dalsegno.web.html import DASH, link, moment, number, table, tag
from dalsegno.web.pages.cluster_map import node_word
from dalsegno.web.pages.labels import ChipKind, chip, event_chip
from dalsegno.web.view import DrillSummary, Page, PageContext, section


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


def drills_page(context: PageContext) -> Page:
    """Return the list of drills."""
    rows = [_drill_row(each) for each in context.data.drills()]
    head = ["Drill", "When", "Outcome", "Faults", "Goodput", "Resumed after (median)", "Weights"]
    empty = tag("p", "No drill yet. Start one: ", tag("code", "dalsegno drill"), class_="empty")
    return Page("Drills", "drills", (section("drills", "Drills", table(head, rows, class_="wide") if rows else empty),))


def _drill_row(drill: DrillSummary) -> list[object]:
    outcome = chip("survived", ChipKind.GOOD) if drill.survived else chip("failed", ChipKind.BAD)
    exact = {True: "identical", False: "differ", None: DASH}[drill.exact]
    resumed = DASH if drill.median_resume_s is None else f"{drill.median_resume_s:.1f} s"
    return [
        tag("th", link(f"/drill/{drill.name}", drill.name), scope="row"), moment(drill.at), outcome,
        number(drill.faults), number(f"{drill.share:.0%}"), number(resumed), exact,
    ]  # fmt: skip
