"""Tests of encoding and parsing a node's report."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.health import (
    BadReport,
    Finding,
    GpuIdentity,
    NodeReport,
    Remedy,
    Result,
    Verdict,
    parse_report,
    report_message,
)

line = st.text(st.characters(exclude_categories=("C", "Z")), max_size=40)
results = st.builds(Result, st.sampled_from(Verdict), line, st.sampled_from(Remedy), line)
findings = st.builds(Finding, line, results, st.floats(0, 1e10))
gpus = st.builds(GpuIdentity, st.integers(0, 63), line, line, line)
reports = st.builds(
    NodeReport, line, line, st.lists(findings, max_size=4).map(tuple), st.lists(gpus, max_size=4).map(tuple)
)
GOOD = report_message(
    NodeReport(
        "gpu-1",
        "b1",
        (Finding("xid", Result(Verdict.FAILED, "gone", Remedy.REBOOT, "79"), 7.0),),
        (GpuIdentity(0, "G-1"),),
    )
)


@given(reports)
def test_a_report_survives_encoding_and_parsing(report: NodeReport):
    assert parse_report(json.loads(json.dumps(report_message(report)))) == report


@pytest.mark.parametrize(
    "change",
    [
        {"node": 7},
        {"node": "gpu-1\nroot"},
        {"node": "n" * 501},
        {"boot": None},
        {"findings": {}},
        {"findings": ["xid"]},
        {"findings": [{**GOOD["findings"][0], "verdict": "fine"}]},
        {"findings": [{**GOOD["findings"][0], "remedy": ["replace"]}]},
        {"findings": [{**GOOD["findings"][0], "at": float("nan")}]},
        {"findings": [{**GOOD["findings"][0], "at": True}]},
        {"findings": GOOD["findings"] * 257},
        {"gpus": [{**GOOD["gpus"][0], "index": -1}]},
        {"gpus": [{**GOOD["gpus"][0], "index": 0.0}]},
        {"more": 1},
    ],
)
def test_an_invalid_report_is_refused(change: dict[str, Any]):
    with pytest.raises(BadReport):
        parse_report({**GOOD, **change})


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | line, lambda kids: st.lists(kids) | st.dictionaries(line, kids)
    )
)
def test_arbitrary_values_are_accepted_or_refused(junk: Any):
    for message in ({**GOOD, "findings": junk}, {**GOOD, "gpus": junk}, {**GOOD, "node": junk}):
        try:
            parse_report(message)
        except BadReport:
            continue


def test_the_sender_truncates_long_texts():
    long = NodeReport("gpu-1", "b1", (Finding("xid", Result(Verdict.WARNED, "x" * 9000), 1.0),))
    assert len(parse_report(report_message(long)).findings[0].result.text) == 500
