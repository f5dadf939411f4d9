"""Text as a terminal shows it: its width in columns, cut and padded. Untrusted text is escaped first."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from dalsegno.printable import one_line

_ELLIPSIS = "…"
_ZERO_WIDTH = ("Mn", "Me", "Cf")
_WIDE = ("W", "F")


class Tone(Enum):
    """The emphasis of a piece of text. The text must be clear without emphasis, because some terminals do not show
    it."""

    PLAIN = ""
    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"
    FAINT = "faint"
    STRONG = "strong"
    BAR = "bar"  # reverse video


@dataclass(frozen=True)
class TonedText:
    """A part of a line, with one tone."""

    text: str
    tone: Tone = Tone.PLAIN


Line = tuple[TonedText, ...]


def columns_of(text: str) -> int:
    """Return the number of columns that printable text takes in a terminal."""
    return len(text) if text.isascii() else sum(map(_letter_columns, text))


@lru_cache(maxsize=4096)
def _letter_columns(letter: str) -> int:
    if unicodedata.category(letter) in _ZERO_WIDTH:
        return 0
    return 2 if unicodedata.east_asian_width(letter) in _WIDE else 1


def cut(text: str, columns: int) -> str:
    """Return the text escaped, and shortened with an ellipsis to at most `columns` columns."""
    shown = one_line(text)
    if columns_of(shown) <= columns:
        return shown
    if columns < 1:
        return ""
    kept, used = [], 0
    for letter in shown:
        used += _letter_columns(letter)
        if used > columns - 1:
            break
        kept.append(letter)
    return "".join(kept) + _ELLIPSIS


def fill(text: str, columns: int, *, right: bool = False) -> str:
    """Return the text cut or padded to exactly `columns` columns; with `right`, padded on the left."""
    shown = cut(text, columns)
    gap = " " * (columns - columns_of(shown))
    return gap + shown if right else shown + gap


def plain_text(line: Line) -> str:
    """Return a line without emphasis and trailing blanks."""
    return "".join(part.text for part in line).rstrip()
