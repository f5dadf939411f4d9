"""Prometheus' text format: escaping, numbers, histograms."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from dalsegno.observe.exposition import Histogram, HistogramFamily, gauge, labelled, render

LINE = re.compile(r'^up\{a="((?:[^"\\\n]|\\["\\n])*)",b="((?:[^"\\\n]|\\["\\n])*)"\} 1$')


def test_family_has_help_type_and_samples():
    families = [gauge("x", "A\nvalue.", 1.5), labelled("y", "Another.", ["a"], {("1",): 2, ("2",): 0})]
    assert render(families).decode().splitlines() == [
        "# HELP x A\\nvalue.", "# TYPE x gauge", "x 1.5",
        "# HELP y Another.", "# TYPE y gauge", 'y{a="1"} 2', 'y{a="2"} 0',
    ]  # fmt: skip


@given(st.text(), st.text())
def test_label_value_never_ends_its_line_or_its_quotes(first, second):
    text = render([labelled("up", "Up.", ["a", "b"], {(first, second): 1})]).decode()
    lines = text.split("\n")
    assert len(lines) == 4 and LINE.match(lines[2]) and lines[3] == ""


def test_labels_that_are_shown_alike_do_not_make_a_series_twice():
    values = {("a\x01",): 1.0, ("a\x02",): 2.0, ("x" * 300,): 3.0, ("x" * 301,): 4.0}
    assert render([labelled("up", "Up.", ["a"], values)]).count(b"up{") == 2


def test_histogram_buckets_are_cumulative_and_inclusive():
    histogram = Histogram((1.0, 10.0)).observe(1.0).observe(5.0).observe(100.0)
    assert list(HistogramFamily("wait", "Wait.", ("p",), {("a",): histogram}).lines())[2:] == [
        'wait_bucket{p="a",le="1"} 1', 'wait_bucket{p="a",le="10"} 2', 'wait_bucket{p="a",le="+Inf"} 3',
        'wait_sum{p="a"} 106', 'wait_count{p="a"} 3',
    ]  # fmt: skip


def test_empty_histogram_shows_all_buckets():
    lines = list(HistogramFamily("wait", "Wait.", (), {(): Histogram((1.0,))}).lines())[2:]
    assert lines == ['wait_bucket{le="1"} 0', 'wait_bucket{le="+Inf"} 0', "wait_sum 0", "wait_count 0"]
