"""Tests that any output of Slurm, complete, truncated or mangled, gives facts or a ParseError."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.slurm.parse.controller import parse_accounts, parse_config, parse_diag, parse_ping
from dalsegno.slurm.parse.jobs import parse_history, parse_jobs, parse_submitted
from dalsegno.slurm.parse.load import parse_fair_shares, parse_node_loads, parse_queue_load, parse_reservations
from dalsegno.slurm.parse.nodes import parse_nodes, parse_partitions
from dalsegno.slurm.parse.text import PLAIN, ParseError

RECORDED = Path(__file__).parent.parent / "recorded" / "slurm-22.05.8"
Parser = Callable[[str], object]


def queued(text: str) -> Sequence[object]:
    return parse_jobs(text, PLAIN).jobs


def history(text: str) -> Sequence[object]:
    return parse_history(text, (RECORDED / "sacct-texts.txt").read_bytes())


ANSWERS: list[tuple[Parser, str]] = [
    (parse_nodes, "nodes"),
    (queued, "squeue-all"),
    (history, "sacct"),
    (parse_partitions, "sinfo"),
    (parse_config, "config"),
    (parse_diag, "sdiag"),
    (lambda text: parse_queue_load(text, PLAIN), "squeue-load"),
    (parse_node_loads, "sinfo-load"),
    (parse_fair_shares, "sshare"),
    (parse_reservations, "reservations"),
    (parse_ping, "ping"),
    (parse_submitted, "version"),
    (lambda text: parse_accounts(text, text, text), "assoc"),
]
NOISE = st.text(alphabet=st.sampled_from("\x1e\x1f\n =|:+,[]()-_/019aZé\0٣²"), max_size=12)


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


def only_parse_errors(parse: Parser, text: str) -> None:
    try:
        parse(text)
    except ParseError as error:
        assert len(error.what) < 400


@pytest.mark.parametrize(("parse", "name"), ANSWERS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_mangled_output_gives_facts_or_a_parse_error(parse: Parser, name: str, data: st.DataObject) -> None:
    text = recorded(name)
    at = data.draw(st.integers(0, len(text)))
    gone = data.draw(st.integers(0, 60))
    only_parse_errors(parse, text[:at] + data.draw(NOISE) + text[at + gone :])


@pytest.mark.parametrize(("parse", "name"), ANSWERS)
@given(text=st.text(max_size=80) | NOISE)
@settings(max_examples=25, deadline=None)
def test_any_text_gives_facts_or_a_parse_error(parse: Parser, name: str, text: str) -> None:
    only_parse_errors(parse, text)


LISTS: list[tuple[Callable[[str], Sequence[object]], str]] = [
    (parse_nodes, "nodes"),
    (queued, "squeue-all"),
    (history, "sacct"),
]


@pytest.mark.parametrize(("parse", "name"), LISTS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_truncated_output_gives_no_partial_record(
    parse: Callable[[str], Sequence[object]], name: str, data: st.DataObject
) -> None:
    text = recorded(name)
    whole = parse(text)
    cut = text[: data.draw(st.integers(1, len(text) - 1))]
    try:
        found = parse(cut)
    except ParseError:
        return
    assert list(found) == list(whole[: len(found)])
