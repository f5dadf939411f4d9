"""Where a followed run is shown: its lines as data, its status below them in a terminal or as talk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from dalsegno.cli import out
from dalsegno.cli.statusline import NOTHING, Cause, last_cause, live_text, new_generations, sentences, told_cause
from dalsegno.printable import lines
from dalsegno.runs import journal
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.logs import Line
from dalsegno.runs.status import RunPhase, Status

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow")
_REDRAW_S = 0.5


def prefixed(line: Line, ranks: int, colour: bool = False, *, foreign: bool = False) -> str:
    """`[ 3] text`, as wide as the largest rank; nothing before the text where there is but one."""
    shown = line.text.rstrip("\r").rpartition("\r")[2]  # of a bar that moves, what a terminal would show in the end
    shown = lines(shown) if foreign else shown
    if ranks <= 1:
        return shown
    mark = f"[{line.rank:>{len(str(ranks - 1))}}] "
    return (out.style(mark, fg=_COLOURS[line.rank % len(_COLOURS)]) if colour else mark) + shown


class Screen:
    """Lines to stdout; on a terminal a status line that stays below them, else a sentence when something changes."""

    def __init__(
        self, ranks: int, *, story: Path | None = None, quiet: bool = False, bare: bool = False, foreign: bool = False
    ) -> None:
        """`story` is the run's journal; `quiet`: no word of ours; `bare`: no rank before the lines; `foreign`: another
        user's run, whose output must not steer this terminal."""
        self._story = story
        self._foreign = foreign
        self.ranks = ranks  # of the largest generation so far
        self._bare = bare
        self._quiet = quiet
        self._live = sys.stderr.isatty() and not quiet
        self._colour = sys.stdout.isatty()
        self._told: Status | None = None
        self._said: set[str] = set()
        self._announced = 0  # the last generation that was told of
        self._drawn = ""
        self._drawn_at = 0.0

    def lines(self, lines: Iterable[Line], news: Callable[[], None] = lambda: None) -> None:
        """As bytes: what a program said goes on as it came, whatever our locale can name.

        Before the first of a new generation comes what there is to say of it: `news`, or else what the journal has.
        """
        sys.stdout.flush()
        for line in lines:
            if line.generation > self._announced:
                sys.stdout.buffer.flush()
                news()
                self.generations(line.generation)
            self.clear()
            self.ranks = max(self.ranks, (line.rank or 0) + 1)
            text = prefixed(line, 1 if self._bare else self.ranks, self._colour, foreign=self._foreign)
            sys.stdout.buffer.write(text.encode("utf-8", "replace") + b"\n")
        sys.stdout.buffer.flush()

    def status(self, status: Status, now: float) -> None:
        self.ranks = max(self.ranks, status.world_size)
        changed = status != self._told
        news = sentences(self._told, status, self._cause(), self._announced) if changed else []
        self._told = status
        if status.phase is RunPhase.RUNNING:
            self._announced = max(self._announced, status.generation)
        if self._quiet:
            return
        for text in news:
            self.talk(text)
        if changed:
            self.notes()
        if self._live:
            self._draw(live_text(status, now), now)

    def generations(self, up_to: int = sys.maxsize) -> None:
        """Those that no status was seen to have: one may be over before anybody has looked."""
        story = list(journal.read(self._story)) if self._story and not self._quiet else []
        for number, text in new_generations(story, self._announced, told_cause(self._told)).items():
            if number <= up_to:
                self._announced = number
                self.talk(text)
        self._announced = max(self._announced, up_to if up_to < sys.maxsize else 0)

    def notes(self) -> None:
        """What the run noted and no status was seen to say: the next word may come too soon after it."""
        noted = journal.read(self._story) if self._story else ()
        for text in [str(entry.get("text")) for entry in noted if entry.get("event") == RunEvent.NOTE]:
            if text not in self._said:
                self.talk(text)

    def _cause(self) -> Cause:
        return last_cause(journal.read(self._story)) if self._story else NOTHING

    def talk(self, text: str) -> None:
        self._said.add(text)
        self.clear()
        out.talk(text)

    def clear(self) -> None:
        if self._drawn:
            click.echo(out.ERASE, nl=False, err=True)
            self._drawn = ""

    def _draw(self, text: str, now: float) -> None:
        if self._drawn and now - self._drawn_at < _REDRAW_S:
            return
        cut = out.fitted(text, out.columns())
        click.echo(out.ERASE + out.style(cut, dim=True), nl=False, err=True)
        self._drawn, self._drawn_at = cut, now
