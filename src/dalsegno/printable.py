"""Text of other people's making, made safe to show: in a terminal, in a log, in a page.

Job names, comments, reasons, paths and messages may hold anything: codes that move the cursor, hide or rewrite text,
line ends that forge a line, marks that reverse the order of reading. What is not plainly visible is shown as an escape.
"""

from __future__ import annotations

import html


def one_line(text: str) -> str:
    """Return the text with everything escaped that is not a visible letter or a blank: `\\x1b`, `\\n`, `\\u202e`."""
    return text if text.isprintable() else "".join(map(_shown, text))


def lines(text: str) -> str:
    """Return the same, but line ends and tabs stay: for text of ours that may hold theirs."""
    return "".join(letter if letter in "\n\t" else _shown(letter) for letter in text)


def logged(text: str) -> str:
    """Return an entry of a log: further lines are indented, so that none of them passes for an entry of its own."""
    return lines(text).replace("\n", "\n    ")


def in_html(text: str) -> str:
    """Return one line of text for a page: neither its letters nor its quotes can end what they stand in."""
    return html.escape(one_line(text))


def _shown(letter: str) -> str:
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode()
