"""Saved drill reports. Pure."""

from __future__ import annotations

from dalsegno.web.html import DASH, link, moment, number, table, tag
from dalsegno.web.pages.labels import ChipKind, chip
from dalsegno.web.view import DrillSummary, Page, PageContext, section


def drills_page(context: PageContext) -> Page:
    """Return the list of drills."""
    rows = [_row(each) for each in context.data.drills()]
    head = ["Drill", "When", "Outcome", "Faults", "Goodput", "Resumed after (median)", "Weights"]
    empty = tag("p", "No drill yet. Start one: ", tag("code", "dalsegno drill"), class_="empty")
    return Page("Drills", "drills", (section("drills", "Drills", table(head, rows, class_="wide") if rows else empty),))


def _row(drill: DrillSummary) -> list[object]:
    outcome = chip("survived", ChipKind.GOOD) if drill.survived else chip("failed", ChipKind.BAD)
    exact = {True: "identical", False: "differ", None: DASH}[drill.exact]
    resumed = DASH if drill.median_resume_s is None else f"{drill.median_resume_s:.1f} s"
    return [
        tag("th", link(f"/drill/{drill.name}", drill.name), scope="row"), moment(drill.at), outcome,
        number(drill.faults), number(f"{drill.share:.0%}"), number(resumed), exact,
    ]  # fmt: skip
