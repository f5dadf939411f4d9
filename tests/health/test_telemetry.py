"""Tests of a simulated node's telemetry: written atomically, read leniently, and healthy at first."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.health.facts import GpuFacts, GpuProcess, LogLine, Port
from dalsegno.health.telemetry import (
    BadTelemetry,
    healthy,
    parse_telemetry,
    read_telemetry,
    telemetry_path,
    telemetry_text,
    with_gpu,
    with_line,
    write_telemetry,
    xid_line,
)

NODE = healthy("gpu-1", 8, "h100")


def test_telemetry_survives_writing_and_reading(tmp_path: Path) -> None:
    broken = with_line(with_gpu(NODE, 3, temperature_c=97.0), 1700000000.5, xid_line(79, "GPU has fallen off the bus."))
    broken = with_gpu(broken, 2, processes=(GpuProcess(7, "python", 400),), throttle=("hw_slowdown",))
    port = Port("mlx5_0/1", "DOWN", flaps=(1700000000.0,), errors={"symbol_error": 3})
    broken = replace(broken, ports=(port,), clock_skew_s=12.5, stamp="made for 8.")
    write_telemetry(tmp_path / "telemetry.json", broken)
    assert read_telemetry(tmp_path / "telemetry.json") == broken
    assert [path.name for path in tmp_path.iterdir()] == ["telemetry.json"]


def test_a_healthy_node_has_all_values_and_unique_gpus() -> None:
    silent = [each.name for gpu in NODE.gpus for each in fields(gpu) if getattr(gpu, each.name) is None]
    assert silent == []
    everyone = [*NODE.gpus, *healthy("gpu-2", 8, "h100").gpus, *healthy("gpu-1", 8, "h100", machine="2").gpus]
    assert len({gpu.uuid for gpu in everyone}) == len({gpu.serial for gpu in everyone}) == 24
    assert (NODE.gpus[0].nvlinks, len(NODE.ports)) == (18, 8)
    assert (healthy("n", 1, "l4").gpus[0].nvlinks, len(healthy("n", 0, "").ports)) == (0, 1)


def test_an_xid_line_has_the_format_of_the_driver() -> None:
    line = xid_line(79, "GPU has fallen off the bus.", pid=4242)
    assert line == "NVRM: Xid (PCI:0000:41:00): 79, pid=4242, GPU has fallen off the bus."


def test_missing_values_and_wrong_types_are_none() -> None:
    telemetry = parse_telemetry(
        '{"gpus": [{"index": 0, "name": "H100", "temperature_c": "hot", "ecc_corrected": true}, 7]}'
    )
    assert telemetry.gpus == (GpuFacts(0, model="H100"),)
    assert parse_telemetry('{"gpus": [], "kernel_log": [{"text": "x"}]}').kernel_log == (LogLine(0.0, "x"),)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"gpus": "many"}', '{"node": "a"}', "\x00"])
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(BadTelemetry):
        parse_telemetry(text)


def test_a_missing_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTelemetry, match="nothing"):
        read_telemetry(tmp_path / "nothing")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(BadTelemetry):
        read_telemetry(tmp_path / "bytes")


def test_the_path_comes_from_the_environment() -> None:
    assert telemetry_path({"DALSEGNO_TELEMETRY": "/run/t.json"}) == Path("/run/t.json")
    assert telemetry_path({}) is None


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(sorted({*json.loads(telemetry_text(NODE)), *json.loads(telemetry_text(NODE))["gpus"][0]}))


@given(st.dictionaries(keys, anything | st.lists(st.dictionaries(keys, anything, max_size=4), max_size=2), max_size=6))
def test_arbitrary_values_never_crash_the_parser(value: dict[str, object]) -> None:
    try:
        parse_telemetry(json.dumps(value))
    except BadTelemetry:
        assert not isinstance(value.get("gpus"), list)
