"""Tables in a limited width: columns are cut, and the least important ones are left out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dalsegno.cli.live.text import Line, Tone, TonedText, columns_of, cut, fill
from dalsegno.printable import one_line

GAP = "  "
_LAST_AT_LEAST = 12  # minimum width of the last column, which takes the rest of the line


@dataclass(frozen=True)
class Column:
    """A column. `most` limits its width. The columns with the highest `drop` are left out first; 0 means never."""

    title: str
    most: int = 24
    drop: int = 0
    right: bool = False


Row = Sequence[TonedText]


def cells(*texts: str | TonedText) -> list[TonedText]:
    return [text if isinstance(text, TonedText) else TonedText(text) for text in texts]


def lay_out(columns: Sequence[Column], rows: Sequence[Row], width: int | None) -> list[int]:
    """Return the width of each column in a table of this width (None: unlimited); 0 for columns that are left out."""
    natural = [
        max([columns_of(column.title), *(columns_of(one_line(row[at].text)) for row in rows)])
        for at, column in enumerate(columns)
    ]
    if width is None:
        return natural
    widths = [min(wide, column.most) for wide, column in zip(natural[:-1], columns[:-1], strict=True)]
    by_drop = sorted(range(len(widths)), key=lambda at: -columns[at].drop)
    for at in by_drop:
        if _total(widths) + _LAST_AT_LEAST <= width or not columns[at].drop:
            break
        widths[at] = 0
    return [*widths, max(0, width - _total(widths))]


def _total(widths: Sequence[int]) -> int:
    return sum(width + len(GAP) for width in widths if width)


def table_line(columns: Sequence[Column], row: Row, widths: Sequence[int], width: int | None) -> Line:
    """Return one row of a table, cut to the width of the screen."""
    shown = [at for at in range(len(columns)) if widths[at]]
    parts: list[TonedText] = []
    left = width if width is not None else _total(widths)
    for at in shown:
        text = fill(row[at].text, widths[at], right=columns[at].right)
        text = text if at == shown[-1] else text + GAP
        text = cut(text, left) if columns_of(text) > left else text
        left -= columns_of(text)
        parts.append(TonedText(text, row[at].tone))
    return tuple(parts)


def heading_line(columns: Sequence[Column], widths: Sequence[int], width: int | None) -> Line:
    titles = [TonedText(column.title, Tone.FAINT) for column in columns]
    return table_line(columns, titles, widths, width)
