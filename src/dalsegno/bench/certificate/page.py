"""A certificate as one self-contained HTML page: no script, nothing from other hosts, all text escaped. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from dalsegno.bench.certificate.certificate import (
    CHANGE_HEAD,
    TITLES,
    Certificate,
    CertificateChange,
    CertifiedPart,
    change_rows,
)
from dalsegno.bench.nccl.verdict import BenchLevel
from dalsegno.bench.picture import to_svg
from dalsegno.printable import in_html

MOST_ROWS = 200  # the page shows at most this many rows of a table; the JSON report has all rows

# The colours are those of a drill report.
STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --dim: #67717e; --paper: #fdfdfb; --line: #d8dce2;
  --well: #3d8f6e; --gone: #c8453b; --warn: #b9770e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --dim: #97a1ae; --paper: #14181e; --line: #333b46;
  --well: #4fae88; --gone: #e0695f; --warn: #e0aa4c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2.5rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .4rem; }
p.when, p.dim, li.dim { color: var(--dim); } p.when { margin: .1rem 0 1.2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--dim); font-size: .8rem; } td:last-child { white-space: normal; }
.level { font-weight: 700; color: var(--dim); } .PASS { color: var(--well); } .DEGRADED { color: var(--warn); }
.FAIL, .IMPOSSIBLE { color: var(--gone); } .simulated { border-left: 4px solid var(--warn); padding-left: .8rem; }
pre { overflow-x: auto; border: 1px solid var(--line); padding: .5rem .8rem; font-size: .85rem; }
svg { max-width: 100%; height: auto; background: #fff; }
""".strip()


def render_certificate(
    certificate: Certificate, changes: Sequence[CertificateChange] | None = None, notes: Sequence[str] = ()
) -> str:
    """Return the page. `changes` are the differences from an older certificate; None if there is no older one."""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(certificate.at))
    title = in_html(f"Certificate of {certificate.cluster}")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{title}</title><style>{STYLE}</style></head><body>",
        f"<h1>{title}: {_level(certificate.level, certificate.heading)}</h1>",
        f'<p class="when">{when}, Dal Segno {in_html(certificate.version)}{", quick" * certificate.quick}</p>',
        _list(certificate.sentences()),
        _simulated(certificate),
        _table(("PART", "VERDICT", "SUMMARY"), [_summary(each) for each in certificate.parts]),
        _changes(changes, notes) if changes is not None else "",
        *(_part(each) for each in certificate.parts),
        "</body></html>",
    ]
    return "\n".join(each for each in parts if each) + "\n"


def _level(level: BenchLevel, word: str) -> str:
    return f'<span class="level {level.value}">{in_html(word)}</span>'


def _simulated(certificate: Certificate) -> str:
    if not certificate.simulated:
        return ""
    return f'<div class="simulated"><b>What was simulated</b>{_list(certificate.simulated)}</div>'


def _summary(each: CertifiedPart) -> tuple[str, str, str]:
    return in_html(each.part.value), _level(each.level, each.word), in_html(each.summary)


def _changes(changes: Sequence[CertificateChange], notes: Sequence[str]) -> str:
    rows = [[in_html(cell) for cell in row] for row in change_rows(changes)]
    table = _table(CHANGE_HEAD, rows) if rows else '<p class="dim">Nothing changed.</p>'
    return f"<h2>Compared with the older certificate</h2>{_list(notes)}{table}"


def _part(each: CertifiedPart) -> str:
    pieces = [f"<h2>{in_html(TITLES[each.part])}: {_level(each.level, each.word)}</h2>"]
    pieces += [f"<p>{in_html(each.summary)}</p>", _list(each.findings)]
    pieces += [f'<div class="wide">{to_svg(picture)}</div>' for picture in each.pictures]
    if each.rows:
        pieces.append(_table(each.head, [[in_html(cell) for cell in row] for row in each.rows]))
    if each.commands:
        commands = "\n".join(map(in_html, each.commands))
        pieces.append(f'<p class="dim">To measure it again:</p><pre>{commands}</pre>')
    return "\n".join(filter(None, pieces))


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{in_html(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _table(head: Iterable[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table with at most MOST_ROWS rows. The caller escapes the cells in `rows`, but not `head`."""
    top = "".join(f"<th>{in_html(word)}</th>" for word in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows[:MOST_ROWS])
    more = len(rows) - MOST_ROWS
    left_out = f'<p class="dim">{more} more rows are in the JSON report.</p>' if more > 0 else ""
    return f'<div class="wide"><table><tr>{top}</tr>\n{body}</table></div>{left_out}'
