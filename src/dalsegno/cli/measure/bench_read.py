"""`dalsegno bench read`: read output of nccl-tests, plot it, and judge it against the hardware catalog."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.out import json_option
from dalsegno.errors import DalsegnoError, UsageError

if TYPE_CHECKING:
    from dalsegno.bench.nccl.report import MachineAsk, NcclReport
    from dalsegno.bench.nccl.table import NcclTable, NcclTest

MOST_ROWS = 400  # maximum number of printed rows
MAX_BYTES = 256 << 20  # maximum size of one file


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--instance", metavar="TYPE", help="Instance type of the nodes, such as p5.48xlarge.")
@click.option("--nodes", type=click.IntRange(1, 1_000_000), metavar="N", help="Number of nodes of the test.")
@click.option(
    "--gpus-per-node", type=click.IntRange(1, 1024), metavar="G", help="GPUs that the test used on each node."
)
@click.option("--test", metavar="NAME", help="Test, if the output does not name it: all_gather.")
@click.option(
    "--history", multiple=True, metavar="FILE", help="Earlier output of the same test on this cluster; repeatable."
)
@click.option("--svg", metavar="FILE", help="Write the plot as SVG.")
@click.option("--png", metavar="FILE", help="Write the plot as PNG.")
@json_option
def command(
    files: tuple[str, ...], instance: str | None, nodes: int | None, gpus_per_node: int | None,
    test: str | None, history: tuple[str, ...], svg: str | None, png: str | None, json_: bool,
) -> int:  # fmt: skip
    """Read output of nccl-tests, plot it, and judge it by the hardware catalog.

    FILE is a log with tables of nccl-tests, of any version, or a file that their option -J wrote. `-` is standard
    input. The instance type is taken from the log where possible; otherwise, name it with `--instance`.

    \b
    Exit code: 0 PASS, 1 FAIL or an error, 3 DEGRADED, 4 IMPOSSIBLE, 5 no verdict.
    With several tables, the worst verdict counts. If a file has no table, the others are shown before the error.

    \b
    dalsegno bench read slurm-42.out --instance p5.48xlarge
    """
    from dalsegno.bench.nccl.report import MachineAsk
    from dalsegno.bench.nccl.verdict import worst

    for option, path in (("--svg", svg), ("--png", png)):
        out.check_writable(option, path)
    reports, errors = _read(files, MachineAsk(instance, nodes, gpus_per_node, _test(test)), history)
    if not reports:
        raise errors[0]
    _write_plots(reports, svg, png)
    level = worst([each.verdict for each in reports])
    if json_:
        out.as_json({"level": level.value, "tables": [each.to_dict() for each in reports]})
    else:
        for report in reports:
            _show(report)
    if errors:
        for error in errors[1:]:
            out.warn(str(error))
        raise errors[0]
    return level.exit_code


def _test(name: str | None) -> NcclTest | None:
    from dalsegno.bench.nccl.table import NcclTest, find_test
    from dalsegno.hardware import did_you_mean

    if name is None:
        return None
    found = find_test(name)
    if found is NcclTest.UNKNOWN:
        names = [each.value for each in NcclTest if each is not NcclTest.UNKNOWN]
        hint = did_you_mean(name, names, f"one of {', '.join(names)}")
        raise UsageError(f"no test `{name}` in nccl-tests", where="--test", hint=hint)
    return found


def _read(
    files: tuple[str, ...], ask: MachineAsk, history: tuple[str, ...]
) -> tuple[list[NcclReport], list[DalsegnoError]]:
    """Return the reports of all files that can be read, and the errors of the others."""
    from dalsegno.bench.nccl.report import NcclReport, read_reports

    earlier = _read_history(history)
    reports, errors = list[NcclReport](), list[DalsegnoError]()
    for name in files:
        try:
            reports += read_reports(name, _text(name), ask, earlier)
        except DalsegnoError as error:
            errors.append(error)
    return reports, errors


def _read_history(names: tuple[str, ...]) -> list[NcclTable]:
    from dalsegno.bench.nccl.parse import read_tables

    return [table for name in names for table in read_tables(_text(name))]


def _text(name: str) -> str:
    """Return the text of a file. Bytes that are not UTF-8 are replaced."""
    if name == "-":
        content = sys.stdin.buffer.read(MAX_BYTES + 1)
    else:
        path = Path(name)
        if path.is_dir():
            raise UsageError(f"`{name}` is a folder", hint="name the files in it")
        if not path.exists():
            raise UsageError(f"no file `{name}`", hint="give the output of nccl-tests, such as `slurm-42.out`")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise DalsegnoError(
            f"`{name}` is larger than {out.size(MAX_BYTES)}",
            hint="keep the lines of one run: `grep -v 'NCCL TRACE' FILE | dalsegno bench read -`",
        )
    return content.decode("utf-8", errors="replace")


def _write_plots(reports: list[NcclReport], svg: str | None, png: str | None) -> None:
    from dalsegno.bench.picture import to_png, to_svg
    from dalsegno.bench.plot import draw, make_curve

    if svg or png:
        picture = draw([make_curve(each.table, each.verdict) for each in reports])
        if svg:
            Path(svg).write_text(to_svg(picture), encoding="utf-8")
        if png:
            Path(png).write_bytes(to_png(picture))


def _shown(table: NcclTable) -> NcclTable:
    """Return the table to print. A very long table, as `-N` produces, is reduced to the best row of each size."""
    from dataclasses import replace

    if len(table.rows) <= MOST_ROWS:
        return table
    best = {row.size: row for row in sorted(table.rows, key=lambda row: row.busbw)}
    out.talk(f"{len(table.rows)} rows: the best of each size is shown, --json prints all")
    return replace(table, rows=tuple(best[size] for size in sorted(best)[:MOST_ROWS]))


def _show(report: NcclReport) -> None:
    from dalsegno.bench.nccl.render import render_rows
    from dalsegno.bench.plot import draw_text, make_curve

    verdict = report.verdict
    out.data(f"{report.source}:{report.table.line}")
    out.data(render_rows(_shown(report.table)))
    if plot := draw_text([make_curve(report.table, verdict)]):
        out.data(f"{plot}\n")
    first, *others = verdict.sentences()
    out.data(f"{verdict.level.value}  {first}")
    for sentence in others:
        out.data(f"  {sentence}")
    if report.algorithm:
        out.data(f"  NCCL used {report.algorithm} at this size")
    for hint in report.hints():
        out.advise(hint)
