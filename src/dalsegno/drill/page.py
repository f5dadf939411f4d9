"""A drill as one HTML page that needs nothing else: the figures, a picture of the time, every event. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dalsegno.drill.picture import render_picture
from dalsegno.drill.story import Drill, Mark
from dalsegno.drill.words import COLUMNS, rows, sentences
from dalsegno.printable import in_html

STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --dim: #67717e; --paper: #fdfdfb; --line: #d8dce2;
  --well: #3d8f6e; --gone: #c8453b; --mending: #d9982b; --curve: #3566b8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --dim: #97a1ae; --paper: #14181e; --line: #333b46;
  --well: #4fae88; --gone: #e0695f; --mending: #e0aa4c; --curve: #79a5ea; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2.5rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
p.legend { color: var(--dim); font-size: .85rem; } p.when { color: var(--dim); margin: .1rem 0 1.2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--dim); font-size: .8rem; } td.text { white-space: normal; }
svg { width: 100%; height: auto; min-width: 40rem; } svg text { font: 11px system-ui, sans-serif; fill: var(--dim); }
.well { fill: var(--well); } .gone { fill: var(--gone); } .mending { fill: var(--mending); }
.grid { stroke: var(--line); } .blow { stroke: var(--gone); stroke-dasharray: 3 3; }
.curve { stroke: var(--curve); fill: none; stroke-width: 1.6; }
""".strip()


LEGEND = (
    '<p class="legend"><b style="color:var(--well)">■</b> in service <b style="color:var(--gone)">■</b> hit, '
    'not out of service yet <b style="color:var(--mending)">■</b> out of service: mended and validated</p>'
)


@dataclass(frozen=True)
class Comparison:
    """What others take for the same, and what such figures do not say."""

    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    notes: Sequence[str]


def render_page(drill: Drill, title: str = "Drill", beside: Comparison | None = None) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(drill.started))
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{in_html(title)}</title><style>{STYLE}</style></head><body>",
        f'<h1>{in_html(title)}</h1><p class="when">{when}, seed {drill.seed}</p>',
        "<ul>" + "".join(f"<li>{in_html(line)}</li>" for line in sentences(drill)) + "</ul>",
        _beside(beside) if beside else "",
        f'<h2>Loss, and what each node went through</h2><div class="wide">{render_picture(drill)}</div>{LEGEND}',
        f"<h2>Every fault</h2>{_table(COLUMNS, rows(drill))}",
        f"<h2>Everything that was noted</h2>{_table(['AFTER', 'WHAT', 'NODE', ''], _events(drill))}",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _beside(beside: Comparison) -> str:
    notes = "".join(f'<p class="legend">{in_html(note)}</p>' for note in beside.notes)
    return f"<h2>Beside it</h2>{_table(beside.head, beside.lines)}{notes}"


def _events(drill: Drill) -> list[list[str]]:
    blows = [Mark(blow.at, "injected", blow.node, blow.fault) for blow in drill.blows]
    noted = sorted([*blows, *drill.marks], key=lambda mark: mark.at)
    return [[f"{mark.at - drill.started:.2f} s", mark.what, mark.node, mark.text] for mark in noted]


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{in_html(word)}</th>" for word in head)
    body = "".join(f"<tr>{_cells(line)}</tr>\n" for line in lines)
    return f'<div class="wide"><table><tr>{top}</tr>\n{body}</table></div>'


def _cells(line: Sequence[str]) -> str:
    *short, last = line
    return "".join(f"<td>{in_html(word)}</td>" for word in short) + f'<td class="text">{in_html(last)}</td>'
