"""Make HTML from values. Text is escaped unless it is `Markup`, so a job name cannot become an element."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from dalsegno.printable import in_html

_EMPTY = frozenset({"br", "input", "link", "meta"})


class Markup(str):
    """Text that is already HTML. Code that creates it must have escaped every value in it."""

    __slots__ = ()


class NumberCell(Markup):
    """A cell with a number."""

    __slots__ = ()


DASH = Markup("\N{EN DASH}")  # shown for a missing value


def esc(text: object) -> Markup:
    """Return text escaped for elements and quoted attributes."""
    return text if isinstance(text, Markup) else Markup(in_html(str(text)))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element. `class_` becomes `class`, and other underscores become hyphens. An attribute that is True has
    no value, and one that is None or False is left out."""
    words = [name, *(_attribute(key, value) for key, value in attributes.items() if value not in (None, False))]
    start = f"<{' '.join(words)}>"
    return Markup(start if name in _EMPTY else f"{start}{join(children)}</{name}>")


def _attribute(key: str, value: object) -> str:
    name = key.rstrip("_").replace("_", "-")
    return name if value is True else f'{name}="{esc(value)}"'


def join(children: Iterable[object]) -> Markup:
    """Return the children as one string: None is skipped, text is escaped, nested sequences are joined."""
    return Markup("".join(_child(each) for each in children if each is not None))


def _child(child: object) -> str:
    if isinstance(child, str):
        return esc(child)
    return join(child) if isinstance(child, Iterable) else esc(child)


def link(target: str, *children: object, **attributes: object) -> Markup:
    return tag("a", *children, href=target, **attributes)


def table(head: Iterable[object], rows: Iterable[Iterable[object]], empty: str = "", **attributes: object) -> Markup:
    """Return a table that scrolls horizontally on a narrow screen; `empty` is shown if there are no rows."""
    cells = [[cell if _is_cell(cell) else tag("td", cell) for cell in row] for row in rows]
    if not cells:
        return tag("p", empty, class_="empty")
    kinds = ["num" if isinstance(cell, NumberCell) else None for cell in cells[0]]
    titles = tag("tr", [tag("th", title, scope="col", class_=kind) for title, kind in zip(head, kinds, strict=True)])
    inner = tag("table", tag("thead", titles), tag("tbody", [tag("tr", row) for row in cells]), **attributes)
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label="table")


def _is_cell(cell: object) -> bool:
    return isinstance(cell, Markup) and cell.startswith(("<td", "<th"))


def number(value: object) -> NumberCell:
    """Return a table cell with a number. Its column, including the heading, is aligned to the right."""
    return NumberCell(tag("td", value, class_="num"))


def moment(at: float | None, how: str = "age") -> Markup:
    """Return a time element. Scripts replace it with "3 min ago" (`how="age"`) or "3 min" (`how="for"`)."""
    if not at:
        return DASH
    try:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
        shown = time.strftime("%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, OSError, ValueError):  # the time is out of range
        return DASH
    return tag("time", shown, datetime=stamp, data_how=how, title=shown)


def plural(count: int, noun: str) -> str:
    """Return `1 node` or `2 nodes`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def clock(seconds: float) -> str:
    """Return a duration: 12 s, 3 min 20 s, 5 h 12 min, 3 d 4 h."""
    whole = max(0, int(seconds)) if math.isfinite(seconds) else 0
    days, hours, minutes, rest = whole // 86400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def gib(mib: float) -> str:
    return f"{mib / 1024:.0f}" if mib >= 10240 else f"{mib / 1024:.1f}"
