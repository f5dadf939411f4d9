"""Escape untrusted text for terminals, logs and HTML pages.

Job names, comments, reasons, paths and messages may contain anything: escape sequences that hide or rewrite text,
line breaks that forge a line, marks that reverse the reading order. Every invisible character is shown as an escape.
"""

from __future__ import annotations

import html


def one_line(text: str) -> str:
    """Return the text with all unprintable characters escaped, such as `\\x1b`, `\\n` and `\\u202e`."""
    return text if text.isprintable() else "".join(map(_shown, text))


def lines(text: str) -> str:
    """Return the text with all unprintable characters escaped, except line breaks and tabs."""
    return "".join(letter if letter in "\n\t" else _shown(letter) for letter in text)


def logged(text: str) -> str:
    """Return the text escaped as one log entry. Later lines are indented, so that none looks like a new entry."""
    return lines(text).replace("\n", "\n    ")


def in_html(text: str) -> str:
    """Return the text on one line, escaped for HTML elements and attributes."""
    return html.escape(one_line(text))


def _shown(letter: str) -> str:
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode()
