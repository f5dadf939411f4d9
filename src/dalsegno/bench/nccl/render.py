"""Write a table as nccl-tests 2.19 do, column for column, so that parsers written for nccl-tests read it.

    text = render(table)                     # everything
    text = render_header(table)              # up to the column names; `table.rows` may be empty
    text += render_row(row, table.columns)   # one call per row, while the test runs
    text += render_footer(table)             # "Out of bounds values" to the end
    text = render_rows(table)                # column names and rows alone

All functions are pure and end their text with a line break. `render` returns header, rows and footer.
"""

from __future__ import annotations

from dalsegno.bench.nccl.table import NcclColumns, NcclDevice, NcclRow, NcclSettings, NcclTable, NcclTest, NcclTiming

_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"  # nccl-tests print this format string where other columns have their unit


def render(table: NcclTable) -> str:
    """Return the whole output of one test."""
    rows = "".join(render_row(row, table.columns) for row in table.rows)
    return render_header(table) + rows + render_footer(table)


def render_rows(table: NcclTable) -> str:
    """Return the column names and the rows, without the header above and the footer below them."""
    names = "".join(f"{line}\n" for line in _column_names(table.columns))
    return names + "".join(render_row(row, table.columns) for row in table.rows)


def render_header(table: NcclTable) -> str:
    """Return the lines above the rows: version, settings, devices, and the names of the columns."""
    lines = []
    if table.version:
        headers, library = table.nccl_headers or 0, table.nccl_library or 0
        lines.append(f"# nccl-tests version {table.version} nccl-headers={headers} nccl-library={library}")
    if table.test is not NcclTest.UNKNOWN:
        lines.append(f"# Collective test starting: {table.test.program}")
    if table.settings:
        lines.append(_settings(table.settings))
    lines += [f"# {note}" for note in table.notes]
    if table.devices:
        lines += ["#", "# Using devices", *map(_device, table.devices)]
    lines += ["#", *_column_names(table.columns)]
    return "".join(f"{line}\n" for line in lines)


def _settings(settings: NcclSettings) -> str:
    unalign = "" if settings.unalign is None else f" unalign: {settings.unalign}"
    step = "factor" if settings.step_is_factor else "bytes"
    return (
        f"# nThread {settings.threads} nGpus {settings.gpus} minBytes {settings.min_bytes}"
        f" maxBytes {settings.max_bytes} step: {settings.step}({step}) warmup iters: {settings.warmup_iters}"
        f" iters: {settings.iters} agg iters: {settings.agg_iters} validation: {settings.validation}"
        f" graph: {settings.graph}{unalign}"
    )


def _device(device: NcclDevice) -> str:
    return (
        f"#  Rank {device.rank:2d} Group {device.group:2d} Pid {device.pid:6d} on {device.host:>10s}"
        f" device {device.device:2d} [{device.pci}] {device.product}"
    )


def _column_names(columns: NcclColumns) -> list[str]:
    lead = "# {:>10s}  {:>12s}  {:>8s}  {:>6s}  {:>6s}"
    time = "cputime" if columns.cpu_time else "time"
    names, units = _placement(time, "algbw", "busbw", "#wrong"), _placement("(us)", "(GB/s)", "(GB/s)", "")
    above = "           out-of-place         "
    if columns.per_iteration:
        names += "".join(f"  {name:>7s}" for name in ("i_min", "i_max", "i_p99", "i_cv%"))
        units += "".join(f"  {name:>7s}" for name in ("(us)", "(us)", "(us)", "(%)"))
        above = "              out-of-place (+ per-iteration)"
    if columns.in_place:
        names, units = names * 2, units * 2
        above = above.rstrip() + (" " * 32 + "in-place (+ per-iteration)" if columns.per_iteration else " " * 23)
        above += "" if columns.per_iteration else "in-place          "
    names += " " + ("timestamp".rjust(19) if columns.timestamps else "")
    units += " " + (_TIME_FORMAT.rjust(19) if columns.timestamps else "")
    return [
        lead.format("", "", "", "", "") + above,
        lead.format("size", "count", "type", "redop", "root") + names,
        lead.format("(B)", "(elements)", "", "", "") + units,
    ]


def _placement(time: str, algbw: str, busbw: str, wrong: str) -> str:
    return f"  {time:>7s}  {algbw:>6s}  {busbw:>6s}  {wrong:>6s}"


def render_row(row: NcclRow, columns: NcclColumns) -> str:
    """Return the line of one message size."""
    lead = f"{row.size:12d}  {row.count:12d}  {row.dtype:>8s}  {row.redop:>6s}  {row.root:6d}"
    placements = (row.out_of_place, row.in_place) if columns.in_place else (row.out_of_place,)
    values = "".join(_timing(each, columns) for each in placements)
    return lead + values + (row.timestamp.rjust(21) if columns.timestamps else "") + "\n"


def _timing(timing: NcclTiming | None, columns: NcclColumns) -> str:
    if timing is None:
        return " " * (68 if columns.per_iteration else 32)
    wrong = "  N/A" if timing.wrong is None else f"{timing.wrong:6g}"  # as in nccl-tests, N/A is one column narrower
    text = f"  {float_text(timing.time_us, 7)}  {float_text(timing.algbw, 6)}  {float_text(timing.busbw, 6)}  {wrong}"
    if columns.per_iteration:
        spread = timing.iterations
        times = (spread.min_us, spread.max_us, spread.p99_us, spread.cv_percent) if spread else (0.0,) * 4
        text += "".join(f"  {float_text(each, 7)}" for each in times)
    return text


def float_text(value: float, width: int) -> str:
    """Return a number with up to two decimals, as many as fit into the width, or else with an exponent."""
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.{1 if width >= 7 else 0}e}"[:width]


def render_footer(table: NcclTable) -> str:
    """Return the lines below the rows. A test that did not finish has none."""
    if table.out_of_bounds is None:
        return ""
    average = "" if table.avg_ok is None else "OK" if table.avg_ok else "FAILED"
    lines = [
        f"# {'Out of bounds values':<20s} : {table.out_of_bounds} {'FAILED' if table.out_of_bounds else 'OK'}",
        f"# {'Avg bus bandwidth':<20s} : {table.avg_busbw or 0.0:g} {average}",
        "#",
    ]
    if table.concluded:
        lines.append(f"# Collective test concluded: {table.test.program}")
    if table.memory:
        lines.append(f"# {'GPU memory usage':<20s} : {table.memory}")
    lines += ["#", f"# error: {table.error}" if table.error else ""]
    return "".join(f"{line}\n" for line in lines)
