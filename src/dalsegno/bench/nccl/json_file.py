"""Read the JSON file that nccl-tests write with `-J`, or the JSON report of our own benchmarks. Pure.

The format of nccl-tests is unusual: booleans are the strings "true" and "false", `okay` may be "unchecked", NaN is the
string "nan", `root` is a padded string, and only the first device of a process is listed. A killed test leaves an
incomplete file. The environment variables in the file are not read, because they may contain secrets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from math import isfinite
from typing import Any

from dalsegno.bench.nccl.table import (
    IterationTimes,
    NcclColumns,
    NcclDevice,
    NcclRow,
    NcclSettings,
    NcclTable,
    NcclTest,
    NcclTiming,
    find_test,
)

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[{}\[\]]', re.DOTALL)  # an incomplete string is also one token
_CLOSERS = {"{": "}", "[": "]"}
_MAX_DEPTH = 64
_MAX_RESULTS = 100_000
_MAX_TABLES = 1024


def read_json(text: str) -> tuple[NcclTable, ...]:
    """Return the tables of a file that `-J` or `bench --json` wrote, complete or not; () for any other text."""
    document = _load(text.strip("\ufeff \t\r\n\x00"))
    if not isinstance(document, dict):
        return ()
    if isinstance(document.get("config"), dict):
        return (_table(document),)
    reports = [_dict(each) for each in _list(document.get("tables"))] or [document]
    return tuple(_own_table(each) for each in reports[:_MAX_TABLES] if _list(each.get("rows")) and "test" in each)


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(_close(text))
    except (ValueError, RecursionError):
        return None


def _close(text: str) -> str:
    """Return the text up to the last complete object, with brackets added for all objects and lists that are open."""
    open_, end, ending = list[str](), 0, ""
    for found in _TOKEN.finditer(text):
        token = found[0]
        if token in _CLOSERS:
            open_.append(_CLOSERS[token])
            if len(open_) > _MAX_DEPTH:
                return ""
        elif open_ and token == open_[-1]:
            open_.pop()
            end, ending = found.end(), "".join(reversed(open_))
    return text[:end] + ending


def _table(document: Mapping[str, Any]) -> NcclTable:
    config = _dict(document.get("config"))
    results = [_dict(each) for each in _list(document.get("results"))[:_MAX_RESULTS]]
    args = [each for each in _list(document.get("args")) if isinstance(each, str)]
    bounds, average = _dict(document.get("out_of_bounds")), _dict(document.get("average_bus_bandwidth"))
    return NcclTable(
        test=next((test for each in args if (test := find_test(each)) is not NcclTest.UNKNOWN), NcclTest.UNKNOWN),
        rows=tuple(row for each in results if (row := _row(each))),
        devices=tuple(map(_device, map(_dict, _list(config.get("devices"))))),
        settings=_settings(config),
        columns=NcclColumns(
            per_iteration=config.get("per_iter_timing") in ("true", True),
            cpu_time=any("cpu_time" in _dict(each.get("out_of_place")) for each in results),
        ),
        nccl_library=_whole(document.get("nccl_version"), None),
        out_of_bounds=_whole(bounds.get("count"), None),
        avg_busbw=_number(average["bandwidth"]) if "bandwidth" in average else None,
        avg_ok={"true": True, "false": False, True: True, False: False}.get(_hashable(average.get("okay"))),
        error="; ".join(each for each in _list(document.get("errors")) if isinstance(each, str))[:1024],
        concluded="end_time" in document and "average_bus_bandwidth" in document,
    )


def _settings(config: Mapping[str, Any]) -> NcclSettings:
    by_factor = "step_factor" in config
    return NcclSettings(
        threads=_whole(config.get("nthreads"), 1), gpus=_whole(config.get("ngpus"), 1),
        min_bytes=_whole(config.get("minimum_bytes"), 0), max_bytes=_whole(config.get("maximum_bytes"), 0),
        step=_whole(config.get("step_factor" if by_factor else "step_bytes"), 0), step_is_factor=by_factor,
        warmup_iters=_whole(config.get("warmup_iters"), 0), iters=_whole(config.get("iterations"), 0),
        agg_iters=_whole(config.get("aggregated_iterations"), 1), validation=_whole(config.get("validation"), 0),
        graph=_whole(config.get("graph"), 0),
    )  # fmt: skip


def _device(device: Mapping[str, Any]) -> NcclDevice:
    return NcclDevice(
        _whole(device.get("rank"), 0), _whole(device.get("group"), 0), _whole(device.get("pid"), 0),
        _text(device.get("hostname")), _whole(device.get("device"), 0), _text(device.get("device_hex")),
        _text(device.get("device_info")),
    )  # fmt: skip


def _row(result: Mapping[str, Any]) -> NcclRow | None:
    first, second = (
        _timing(_dict(result.get(name)), _dict(result.get(f"{name}_per_iter"))) for name in ("out_of_place", "in_place")
    )
    if first is None and second is None:
        return None
    return NcclRow(
        _whole(result.get("size"), 0), _whole(result.get("count"), 0), _text(result.get("type"))[:16],
        _text(result.get("redop"))[:16], _whole(result.get("root"), -1), first, second,
    )  # fmt: skip


def _timing(values: Mapping[str, Any], spread: Mapping[str, Any]) -> NcclTiming | None:
    if "bus_bw" not in values:
        return None
    wrong = values.get("nwrong")
    iterations = IterationTimes(
        _number(spread.get("min_us")), _number(spread.get("max_us")), _number(spread.get("p99_us")),
        _number(spread.get("cv_pct")),
    )  # fmt: skip
    return NcclTiming(
        _number(values.get("time", values.get("cpu_time"))), _number(values.get("alg_bw")), _number(values["bus_bw"]),
        None if wrong is None else _number(wrong), iterations if "min_us" in spread else None,
    )  # fmt: skip


# The report of `bench all_reduce --json` and `bench read --json`, which `NcclReport.to_dict` writes


def _own_table(report: Mapping[str, Any]) -> NcclTable:
    return NcclTable(
        test=find_test(_text(report.get("test"))),
        rows=tuple(row for each in _list(report["rows"])[:_MAX_RESULTS] if (row := _own_row(_dict(each)))),
        devices=tuple(map(_own_device, map(_dict, _list(report.get("devices"))))),
        settings=_own_settings(_dict(report.get("settings"))),
        out_of_bounds=_whole(report.get("wrong"), None),
        error=_text(report.get("error")),
        line=_whole(report.get("line"), 0),
    )


def _own_settings(values: Mapping[str, Any]) -> NcclSettings | None:
    names = [each.name for each in fields(NcclSettings)]
    if not set(names) <= set(values):
        return None
    found = NcclSettings(**{name: _whole(values[name], 1) for name in names})
    return replace(found, step_is_factor=bool(found.step_is_factor), unalign=_whole(values["unalign"], None))


def _own_device(device: Mapping[str, Any]) -> NcclDevice:
    rank, group, pid, number = (_whole(device.get(name), 0) for name in ("rank", "group", "pid", "device"))
    host, pci, product = (_text(device.get(name)) for name in ("host", "pci", "product"))
    return NcclDevice(rank, group, pid, host, number, pci, product)


def _own_row(row: Mapping[str, Any]) -> NcclRow | None:
    first, second = (_own_timing(_dict(row.get(name))) for name in ("out_of_place", "in_place"))
    if first is None and second is None:
        return None
    return NcclRow(
        _whole(row.get("size"), 0), _whole(row.get("count"), 0), _text(row.get("dtype"))[:16],
        _text(row.get("redop"))[:16], _whole(row.get("root"), -1), first, second, _text(row.get("timestamp"))[:32],
    )  # fmt: skip


def _own_timing(values: Mapping[str, Any]) -> NcclTiming | None:
    if "busbw" not in values:
        return None
    wrong, spread = values.get("wrong"), _dict(values.get("iterations"))
    names = ("min_us", "max_us", "p99_us", "cv_percent")
    iterations = IterationTimes(*(_number(spread.get(name)) for name in names)) if spread else None
    time_us, algbw, busbw = (_number(values.get(name)) for name in ("time_us", "algbw", "busbw"))
    return NcclTiming(time_us, algbw, busbw, None if wrong is None else _number(wrong), iterations)


# Conversion of values whose type is not known


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value.strip()[:256] if isinstance(value, str) else ""


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str | bool) else None


def _whole(value: Any, otherwise: Any) -> Any:
    """Return a whole number of at most 63 bits; `otherwise` for everything else."""
    try:
        number = int(value) if isinstance(value, int | float | str) else otherwise
    except (ValueError, OverflowError):
        return otherwise
    return number if number is None or abs(number) < 1 << 63 else otherwise


def _number(value: Any) -> float:
    """Return a number; 0 for everything else. "nan" counts as 0, because comparisons with NaN are always false."""
    try:
        number = float(value) if isinstance(value, int | float | str) else 0.0
    except (ValueError, OverflowError):
        return 0.0
    return number if isfinite(number) else 0.0
