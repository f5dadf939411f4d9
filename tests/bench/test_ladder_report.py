"""The report of the ladder benchmark: its table, its pictures, its JSON."""

import json
from xml.etree import ElementTree

import pytest

from dalsegno.bench.ladder.ladder import HEADERS, describe_unmeasured, read_report, table_rows
from dalsegno.bench.ladder.timeline import LEGEND, draw, render_svg
from tests.bench.reports import DATA_PARALLEL, DDP, RING, report


def test_row_has_median_ratio_to_ddp_and_traffic_of_the_busiest_rank():
    assert table_rows(report(RING, DDP)) == [
        ["ring", "30.0 ms", "1.50", "4", "2", "16.00 MiB", "17.00 MiB"],
        # The bytes are computed, because nothing was sent over TCP
        ["ddp", "20.0 ms", "1.00", "3", "~6", "~16.00 MiB", "-"],
    ]


def test_unmeasured_rung_has_a_reason_instead_of_times():
    only = report(DATA_PARALLEL)
    assert table_rows(only) == [["data-parallel", *["-"] * (len(HEADERS) - 1)]]
    assert describe_unmeasured(only) == ["data-parallel was not measured: here there are no GPUs"]


def test_headline_names_processes_backend_and_gradients():
    assert report(DDP).headline == "2 processes, gloo on cpu, 16.00 MiB of gradients"


def test_ratio_needs_ddp():
    assert report(RING).ratio(RING) is None
    assert report(DDP, DATA_PARALLEL).ratio(DATA_PARALLEL) is None


def test_report_survives_json():
    whole = report(RING, DATA_PARALLEL, DDP)
    assert read_report(json.dumps(whole.to_dict())) == whole


def test_json_has_the_figures_of_the_table():
    ring, ddp = report(RING, DDP).to_dict()["rungs"]
    assert (ring["median_s"], ring["times_ddp"], ddp["times_ddp"]) == (0.03, pytest.approx(1.5), 1.0)


def test_text_timeline_has_compute_above_communication_on_one_scale():
    assert draw([RING, DATA_PARALLEL, DDP], width=12).splitlines() == [
        "ring  fffbbb",
        "            ======",
        "ddp   bbbbbb",
        "         ===",
        "      0 ms 40.0 ms",
        LEGEND,
    ]
    assert draw([DATA_PARALLEL]) == ""


def test_svg_has_a_bar_for_every_span_inside_its_frame():
    picture = ElementTree.fromstring(render_svg(report(RING, DATA_PARALLEL, DDP)))
    rects = picture.findall("{*}rect")
    bars = [each for each in rects if each.find("{*}title") is not None]
    assert len(bars) == len(RING.marks) + len(DDP.marks)
    assert max(float(bar.attrib["x"]) + float(bar.attrib["width"]) for bar in bars) <= float(picture.attrib["width"])
    assert max(float(bar.attrib["y"]) for bar in bars) < float(picture.attrib["height"])
    assert "send <1 B> to 1: 20.00 to 40.00 ms" in [bar.findtext("{*}title") for bar in bars]


def test_svg_of_an_empty_report_is_valid():
    assert ElementTree.fromstring(render_svg(report(DATA_PARALLEL))).tag.endswith("svg")
