"""Parsing of option values, and errors for invalid ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.errors import UsageError
from dalsegno.runs.submit import values
from dalsegno.runs.submit.plan import slurm_time
from dalsegno.runs.submit.values import UNLIMITED_S, Gpus, NodeCount

HOUR = 3600


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (values.parse_nodes, "4", NodeCount(4, 4)),
        (values.parse_nodes, "1:4", NodeCount(1, 4)),
        (values.parse_gpus, "8", Gpus(8)),
        (values.parse_gpus, "h100:8", Gpus(8, "h100")),
        (values.parse_gpus, "0", Gpus(0)),
        (values.parse_time_limit, "90", 90 * 60),
        (values.parse_time_limit, "90:30", 90 * 60 + 30),
        (values.parse_time_limit, "2:00:00", 2 * HOUR),
        (values.parse_time_limit, "1-12", 36 * HOUR),
        (values.parse_time_limit, "1-12:30", 36 * HOUR + 1800),
        (values.parse_time_limit, "1-12:30:05", 36 * HOUR + 1805),
        (values.parse_time_limit, "2h", 2 * HOUR),
        (values.parse_time_limit, "UNLIMITED", UNLIMITED_S),
        (values.parse_time_limit, "0", UNLIMITED_S),
        (values.parse_seconds, "90", 90),
        (values.parse_seconds, "10m", 600),
        (values.parse_seconds, "off", 0),
        (values.parse_memory, "64G", 65_536),
        (values.parse_memory, "512", 512),
        (values.parse_memory, "0", 0),
        (values.parse_hosts, "gpu[1-3],x", ("gpu1", "gpu2", "gpu3", "x")),
        (values.parse_env_words, "A=1 B='x y' C=", (("A", "1"), ("B", "x y"), ("C", ""))),
        (values.parse_words, "--a 'b c'", ("--a", "b c")),
        (values.parse_modules, "a.b, c", ("a.b", "c")),
        (values.parse_flag, "Yes", True),
        (values.parse_flag, "0", False),
    ],
)
def test_values_mean_the_same_as_in_slurm_and_torchrun(
    parse: Callable[[str], object], text: str, value: object
) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "what"),
    [
        (values.parse_nodes, "0", "`0` is not a number of nodes"),
        (values.parse_nodes, "4:1", "`4:1` is not a number of nodes"),
        (values.parse_nodes, "1-4", "`1-4` is not a number of nodes"),
        (values.parse_nodes, "٤", "`٤` is not a number of nodes"),
        (values.parse_positive, "0", "`0` is not a whole number from 1 to 65536"),
        (values.parse_count, "-1", "`-1` is not a whole number from 0 to 65536"),
        (values.parse_gpus, "h100", "`h100` is not a number of GPUs"),
        (values.parse_time_limit, "soon", "`soon` is not a time"),
        (values.parse_seconds, "unlimited", "`unlimited` is not a duration"),
        (values.parse_memory, "much", "`much` is not a size"),
        (values.parse_hosts, "n[4-1]", "range `4-1` in host list 'n[4-1]' runs backwards"),
        (values.parse_env_words, "A", "`A` is not of the form NAME=value"),
        (values.parse_env_words, "1A=2", "`1A=2` is not of the form NAME=value"),
        (values.parse_words, "'open", "`'open` cannot be split into words: No closing quotation"),
        (values.parse_modules, "os;rm", "`os;rm` is not the name of a Python module"),
        (values.parse_flag, "maybe", "`maybe` is neither yes nor no"),
    ],
)
def test_invalid_values_are_refused_with_a_message(parse: Callable[[str], object], text: str, what: str) -> None:
    with pytest.raises(UsageError) as fault:
        parse(text)
    assert fault.value.what == what


def test_last_value_of_a_repeated_variable_counts() -> None:
    assert values.parse_env_pairs(["A=1", "B=2", "A=3=4"]) == (("B", "2"), ("A", "3=4"))


def test_messages_contain_no_control_characters() -> None:
    assert values.shown("a\n\x1b[31mb" + "c" * 80) == "`a??[31mb" + "c" * 52 + "…`"


@given(st.integers(1, 10**8))
def test_time_limit_survives_the_round_trip(seconds: int) -> None:
    assert values.parse_time_limit(slurm_time(seconds)) == seconds


@given(st.builds(NodeCount, st.integers(1, 99), st.integers(99, 65_536)))
def test_number_of_nodes_survives_the_round_trip(nodes: NodeCount) -> None:
    assert values.parse_nodes(str(nodes)) == nodes


@given(st.text())
def test_random_text_does_not_crash_a_parser(text: str) -> None:
    for parse in (values.parse_nodes, values.parse_gpus, values.parse_time_limit, values.parse_memory,
                  values.parse_hosts, values.parse_env_words, values.parse_modules, values.parse_flag):  # fmt: skip
        try:
            parse(text)
        except UsageError as fault:
            assert fault.what.isprintable()


@pytest.mark.parametrize(("text", "seconds"), [("3", 3.0), ("1.5", 1.5), ("1.5s", 1.5), (" 0.5 S", 0.5)])
def test_node_timeout_accepts_fractions(text: str, seconds: float) -> None:
    assert values.parse_node_timeout(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1", "1e3", "1m", "1.2345"])
def test_invalid_node_timeout_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="number of seconds"):
        values.parse_node_timeout(text)
