"""Find the page for a path. Pure."""

from __future__ import annotations

from collections.abc import Callable

from dalsegno.web.pages.cluster_map import cluster_page
from dalsegno.web.pages.frame import SECTIONS
from dalsegno.web.pages.goodput import goodput_page, users_page
from dalsegno.web.pages.history import drills_page, events_page
from dalsegno.web.pages.node import node_page
from dalsegno.web.pages.queue import queue_page
from dalsegno.web.pages.runs import run_page, runs_page
from dalsegno.web.view import Page, PageContext

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
