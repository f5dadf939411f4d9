"""One frame of the view: facts, the state of the view and the size of the screen in, lines out. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dalsegno.cli.live.facts import LiveFacts, SourceHealth
from dalsegno.cli.live.panels import COLUMNS, Filter, PanelRows, panel_rows
from dalsegno.cli.live.table import heading_line, lay_out, table_line
from dalsegno.cli.live.text import Line, Tone, TonedText, columns_of, cut, fill, plain_text
from dalsegno.cli.live.view import Panel, PanelSize, ViewState
from dalsegno.cli.training.statusline import age
from dalsegno.overview.verdict import VerdictLevel, describe
from dalsegno.printable import one_line
from dalsegno.runs.status import is_over
from dalsegno.slurm.facts import JobState
from dalsegno.targets.base import counted

MIN_ROWS, MIN_COLUMNS = 6, 24
SMALL_ROWS = 3  # rows for each panel before the selected panel gets the rest
_OVERHEAD = 2  # lines for the title and the heading of a panel
_KEYS = "q quit  Tab 1-4 panel  j/k PgUp/PgDn scroll  / filter  p pause  ? help"
_TONES = {VerdictLevel.GOOD: Tone.GOOD, VerdictLevel.WARN: Tone.WARNING, VerdictLevel.BAD: Tone.BAD}
_HELP = (
    "Keys",
    "",
    "  q, Ctrl-C               quit",
    "  1 2 3 4, Tab, Shift-Tab select a panel: it gets the most space",
    "  up, down, j, k          scroll the selected panel by a row",
    "  PgUp, PgDn, space       scroll it by a page",
    "  g, G, Home, End         go to its first or last row",
    "  /                       filter all panels by name; Enter keeps the filter",
    "  Escape                  remove the filter",
    "  p                       pause, and continue",
    "  Ctrl-L                  draw the screen again",
    "  ?, h                    this help; any key closes it",
    "",
    "Nodes that need attention come first. The page docs/top.md explains the columns.",
)


@dataclass(frozen=True)
class Frame:
    """The lines of the screen, and the sizes of its panels."""

    lines: tuple[Line, ...]
    sizes: Mapping[Panel, PanelSize] = field(default_factory=dict)


@dataclass(frozen=True)
class ScreenSize:
    """The size of a screen. None: unlimited, as for a pipe."""

    columns: int | None = 80
    rows: int | None = 24


def render(facts: LiveFacts | None, view: ViewState, size: ScreenSize, now: float) -> Frame:
    """Return the frame for a screen of this size. `facts` is None until the first answer has arrived."""
    if facts is None:
        return _fit(Frame((_line("waiting for the first answer of Slurm and the controller; q quits"),)), size)
    if size.rows is not None and size.columns is not None and (size.rows < MIN_ROWS or size.columns < MIN_COLUMNS):
        return _fit(Frame((_line(describe(facts.verdict)), _line("screen too small"))), size)
    if view.help:
        return _fit(Frame(tuple(map(_line, _HELP))), size)
    head = [_title_line(facts, view, size.columns, now), *_remarks(facts, now)]
    panels = panel_rows(facts, Filter(view.filter), now)
    room = None if size.rows is None else size.rows - len(head) - 1
    body, sizes = _panels(panels, view, size.columns, room)
    foot = () if size.rows is None else (_foot_line(view, size.columns),)
    if room is not None:
        body += [()] * (room - len(body))
    return _fit(Frame((*head, *body, *foot), sizes), size)


def frame_text(frame: Frame) -> str:
    """Return the frame as plain text, for a pipe or a file."""
    return "\n".join(plain_text(line) for line in frame.lines)


def _line(text: str, tone: Tone = Tone.PLAIN) -> Line:
    return (TonedText(text, tone),)


def _fit(frame: Frame, size: ScreenSize) -> Frame:
    """Cut the frame to the size of the screen, and escape unprintable characters."""
    lines = frame.lines if size.rows is None else frame.lines[: size.rows]
    return Frame(tuple(_cut_line(line, size.columns) for line in lines), frame.sizes)


def _cut_line(line: Line, columns: int | None) -> Line:
    left, kept = columns, []
    for part in line:
        text = one_line(part.text) if left is None else cut(part.text, left)
        kept.append(TonedText(text, part.tone))
        left = None if left is None else left - columns_of(text)
    return tuple(kept)


# The lines above the panels


def _title_line(facts: LiveFacts, view: ViewState, columns: int | None, now: float) -> Line:
    """Return the verdict on the left, and the time or `paused` on the right."""
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    right = f"  {'paused at ' if view.paused else ''}{clock}"
    name = f"{facts.overview.status.name}  "
    verdict = TonedText(describe(facts.verdict), _TONES[facts.verdict.level])
    if columns is None:
        return TonedText(name, Tone.STRONG), verdict, TonedText(right)
    room = max(0, columns - columns_of(name) - columns_of(right))
    return TonedText(name, Tone.STRONG), TonedText(fill(verdict.text, room), verdict.tone), TonedText(right)


def _remarks(facts: LiveFacts, now: float) -> Iterator[Line]:
    yield _line(_summary(facts))
    for name, source in (("slurmctld", facts.slurm), ("the controller", facts.controller)):
        if source.silent_since is not None:
            yield _line(_silence(name, source, now), Tone.BAD)
    problems = facts.overview.status.problems
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        yield _line(f"warning: {problems[0]}{more}", Tone.WARNING)


def _silence(name: str, source: SourceHealth, now: float) -> str:
    since = age(now - (source.silent_since or now))
    if source.answered_at is None:
        return f"{name} has not answered for {since}"
    at = time.strftime("%H:%M:%S", time.localtime(source.answered_at))
    return f"{name} has not answered for {since}: what is known from it is as of {at}"


def _summary(facts: LiveFacts) -> str:
    overview = facts.overview
    nodes, jobs = overview.status.nodes, overview.status.jobs or ()
    running = sum(job.state is JobState.RUNNING for job in jobs)
    pending = sum(job.state is JobState.PENDING for job in jobs)
    runs = sum(not is_over(run.status) for run in overview.runs)
    gpus = f"{sum(node.gpus_used or 0 for node in nodes)}/{sum(node.gpus for node in nodes)} GPUs in use"
    queue = f"{counted(running, 'job')} running, {pending} pending"
    parts = [counted(len(nodes), "node"), gpus, counted(runs, "run"), queue]
    return "  ".join([*parts, *(f"{key} {value}" for key, value in overview.status.facts.items())])


def _foot_line(view: ViewState, columns: int | None) -> Line:
    if view.typing:
        text = f"filter: {view.filter}_  (Enter keeps it, Escape removes it)"
    else:
        text = f"filter: {view.filter}  (Escape removes it)  {_KEYS}" if view.filter else _KEYS
    return _line(text if columns is None else fill(text, columns), Tone.BAR)


# Layout of the panels


def _panels(
    panels: Mapping[Panel, PanelRows], view: ViewState, columns: int | None, room: int | None
) -> tuple[list[Line], dict[Panel, PanelSize]]:
    heights = share_rows({panel: len(rows.rows) for panel, rows in panels.items()}, view.panel, room)
    lines: list[Line] = []
    sizes = {}
    for panel, height in heights.items():
        shown = max(0, height - _OVERHEAD)
        size = PanelSize(shown, len(panels[panel].rows))
        sizes[panel] = size
        lines += _panel_lines(panel, panels[panel], view, columns, size)[:height]
    return lines, sizes


def share_rows(counts: Mapping[Panel, int], selected: Panel, room: int | None) -> dict[Panel, int]:
    """Return the number of lines of each panel. The selected panel is the first to get more than the minimum. On a
    small screen, only the selected panel is shown."""
    wanted = {panel: _OVERHEAD + max(1, count) for panel, count in counts.items()}
    if room is None:
        return wanted
    least = {panel: min(wanted[panel], _OVERHEAD + 1) for panel in wanted}
    if sum(least.values()) - least[selected] + min(wanted[selected], room // 2) > room:
        return {selected: room}
    left = room - sum(least.values())
    heights = dict(least)
    order = [panel for panel in wanted if panel is not selected]
    left -= _grow(heights, selected, min(wanted[selected], room // 2), left)
    for panel in order:  # a few rows for each panel, before the selected panel takes the rest
        left -= _grow(heights, panel, min(wanted[panel], _OVERHEAD + SMALL_ROWS), left)
    for panel in [selected, *order]:
        left -= _grow(heights, panel, wanted[panel], left)
    return heights


def _grow(heights: dict[Panel, int], panel: Panel, wanted: int, left: int) -> int:
    more = max(0, min(wanted - heights[panel], left))
    heights[panel] += more
    return more


def _panel_lines(
    panel: Panel, content: PanelRows, view: ViewState, columns: int | None, size: PanelSize
) -> Sequence[Line]:
    selected = panel is view.panel and columns is not None
    first = min(view.offsets.get(panel, 0), size.last_offset)
    rows = content.rows[first : first + size.shown]
    mark = ">" if selected else " "
    place = f"  rows {first + 1}-{first + len(rows)} of {size.total}" if len(rows) < size.total and rows else ""
    title = _line(f"{mark}{panel.value} {content.title}{place}", Tone.STRONG)
    if not rows:
        return [title, _line(f"  {content.empty if not view.filter else 'nothing matches the filter'}", Tone.FAINT)]
    widths = lay_out(COLUMNS[panel], content.rows, columns)
    heading = heading_line(COLUMNS[panel], widths, columns)
    return [title, heading, *(table_line(COLUMNS[panel], row, widths, columns) for row in rows)]
