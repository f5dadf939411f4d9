"""Text of others' making, made safe to show."""

from __future__ import annotations

import html

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.printable import in_html, lines, logged, one_line

ANY = st.text(st.characters() | st.sampled_from("\x1b\x9b\x07\r\n\t\u2028\u202e\udcff<>&\"'"))


@given(ANY)
def test_one_line_is_one_visible_line_and_can_be_written(text: str) -> None:
    shown = one_line(text)
    assert shown.isprintable() and len(shown.splitlines()) <= 1
    shown.encode()


@given(ANY)
def test_lines_keeps_line_ends_and_tabs_only(text: str) -> None:
    assert lines(text).replace("\n", "").replace("\t", "").isprintable()


@given(ANY)
def test_in_html_ends_neither_an_element_nor_an_attribute(text: str) -> None:
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
def test_what_is_visible_stays_and_the_rest_is_escaped(text: str, shown: str) -> None:
    assert one_line(text) == shown


def test_no_line_of_a_message_passes_for_an_entry_of_a_log() -> None:
    forged = "bad request\n2026-11-16T05:10:56 all nodes are drained\r\x1b[1A"
    assert logged(forged) == "bad request\n    2026-11-16T05:10:56 all nodes are drained\\r\\x1b[1A"
