"""Tests of escaping untrusted text."""

from __future__ import annotations

import html

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.printable import in_html, lines, logged, one_line

ANY = st.text(st.characters() | st.sampled_from("\x1b\x9b\x07\r\n\t\u2028\u202e\udcff<>&\"'"))


@given(ANY)
def test_one_line_returns_one_printable_line(text: str) -> None:
    shown = one_line(text)
    assert shown.isprintable() and len(shown.splitlines()) <= 1
    shown.encode()


@given(ANY)
def test_lines_keeps_only_line_breaks_and_tabs(text: str) -> None:
    assert lines(text).replace("\n", "").replace("\t", "").isprintable()


@given(ANY)
def test_in_html_cannot_end_an_element_or_attribute(text: str) -> None:
    shown = in_html(text)
    assert not set(shown) & set("<>\"'") and html.unescape(shown) == one_line(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("train-k3f9x: 7 steps, é, 漢字", "train-k3f9x: 7 steps, é, 漢字"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("two\nlines", "two\\nlines"),
        ("safe\u202etxt.exe", "safe\\u202etxt.exe"),
    ],
)
def test_printable_text_is_kept_and_the_rest_is_escaped(text: str, shown: str) -> None:
    assert one_line(text) == shown


def test_message_lines_cannot_look_like_log_entries() -> None:
    forged = "bad request\n2026-11-16T05:10:56 all nodes are drained\r\x1b[1A"
    assert logged(forged) == "bad request\n    2026-11-16T05:10:56 all nodes are drained\\r\\x1b[1A"
