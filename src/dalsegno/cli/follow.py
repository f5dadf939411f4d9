"""Following a run to its end: its lines, its status, and what to do when the user has seen enough."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.interrupts import INTERRUPTED, interruptible
from dalsegno.cli.statusline import (
    NOTHING,
    Cause,
    farewell,
    last_cause,
    live_text,
    new_generations,
    sentences,
    told_cause,
)
from dalsegno.cli.watch import RunWatch, is_over
from dalsegno.printable import lines
from dalsegno.runs import journal
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.logs import Line, Repeats, RunLogs
from dalsegno.runs.status import RunCause, RunPhase, RunStatus
from dalsegno.slurm.parse.messages import SlurmRefusal, parse_refusal
from dalsegno.system.files import read_text
from dalsegno.train.contract import TERMINATED

if TYPE_CHECKING:
    from dalsegno.cluster import SlurmHere
    from dalsegno.runs.submit.plan import RunPlan


# ---- Where a followed run is shown: its lines as data, its status below them in a terminal or as talk.


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
        self._told: RunStatus | None = None
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

    def status(self, status: RunStatus, now: float) -> None:
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


# ---- Signals while a run is followed: noted, and answered between two looks, so that no line is cut in half.


@dataclass
class Inbox:
    """The signal that came last and has not been answered; 0: none."""

    number: int = 0

    def take(self) -> int:
        number, self.number = self.number, 0
        return number

    def put(self, number: int, _frame: FrameType | None) -> None:
        if self.number:  # the first was not even looked at: we hang, say in a pipe that nobody reads
            raise KeyboardInterrupt
        self.number = number


@contextmanager
def noted(*numbers: int) -> Iterator[Inbox]:
    inbox = Inbox()
    before = {number: signal.signal(number, inbox.put) for number in numbers}
    try:
        yield inbox
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- What to do about a job that Slurm refused.


_HINTS = {
    SlurmRefusal.MEMORY: "no node has so much memory: `sinfo -N -o '%N %m'` shows how many MiB; give `--mem` less",
    SlurmRefusal.FEATURE: "`sinfo -N -o '%N %f'` lists the features that `--constraint` may name",
    SlurmRefusal.NODE_NAME: "`sinfo -N` lists the nodes that `--exclude` may name",
    SlurmRefusal.ACCOUNT: "`sacctmgr show associations user=$USER` lists what `--account` and `--partition` may be",
    SlurmRefusal.QOS: "`sacctmgr show associations user=$USER format=account,qos` lists what `--qos` may be",
    SlurmRefusal.TIME_LIMIT: "`sinfo -o '%P %l'` shows the partitions' limits; give `--time` less",
    SlurmRefusal.POLICY: "`sacctmgr show qos` and `sacctmgr show associations` show the limits",
    SlurmRefusal.NO_SUCH_NODES: "no nodes have all that: `sinfo -N -o '%N %c %m %G %f'` shows what they have",
}


def end_hint(run: RunFolder, status: RunStatus) -> str:
    """After a run that did not end well: where to look."""
    if status.cause is not RunCause.REFUSED:
        spoke = any(run.logs.glob("g*/*"))
        return (
            f"`dalsegno logs {run.run}` shows all it said" if spoke else f"`dalsegno why {run.run}` shows how it went"
        )
    log = run.salloc_log(1)
    refusal = parse_refusal(f"{read_text(log) or ''}{status.message}")
    return _HINTS.get(refusal, f"all of Slurm's words are in {log}")


# ---- Following a run to its end: its lines, its status, and what to do when the user has seen enough.


POLL_S = 0.1
FILES_PER_S = 1000  # each look opens every log once, and others use the file system too


@dataclass
class Follower:
    """One run on one screen. `cancel` ends the run."""

    run: str
    logs: RunLogs
    watch: RunWatch
    screen: Screen
    cancel: Callable[[], None]
    hint: Callable[[RunStatus], str]  # where to look after an end that is not a good one
    repeats: Repeats = field(default_factory=Repeats)

    def follow(self) -> int:
        """Until the run is over: its exit code. Or until the user leaves: 0, or that of the signal."""
        try:
            with noted(signal.SIGINT, signal.SIGTERM) as inbox:
                return self._until_end(inbox)
        except KeyboardInterrupt:
            return self._detach()
        except BrokenPipeError:
            self._detach()
            raise
        finally:
            self.screen.clear()

    def _until_end(self, inbox: Inbox) -> int:
        while True:
            now = time.time()
            status = self.watch.look(now)  # first: what is logged before a run's last status is then seen below
            tell = partial(self.screen.status, status, now) if not is_over(status) else _nothing
            self.screen.lines(self.repeats.once(self.logs.lines(now, final=is_over(status))), news=tell)
            if is_over(status):
                return self._end(status)
            self.screen.status(status, now)
            code = self._answer(inbox.take())
            if code is not None:
                return code
            time.sleep(pause_s(self.logs))

    def _end(self, status: RunStatus) -> int:
        self.screen.generations()
        self.screen.notes()
        self.screen.clear()
        if status.exit_code == 0:
            out.talk(farewell(status))
            return 0
        if status.report and not (self.repeats.has_shown(status.report) and _one_place()):
            out.talk(status.report.rstrip("\n"))
        out.error(farewell(status), hint=self.hint(status))
        return status.exit_code or 1

    def _answer(self, number: int) -> int | None:
        """What a signal leads to: the exit code to leave with, or None to go on."""
        if not number:
            return None
        if number == signal.SIGTERM:
            self._detach()
            return TERMINATED
        if not (sys.stdin.isatty() and sys.stderr.isatty()):  # Ctrl-C in a script means stop
            return self._give_up()
        self.screen.clear()
        wish = ask_what_to_do()
        if wish == "c":
            return self._give_up()
        return self._detach() if wish == "d" else None

    def _give_up(self) -> int:
        self.screen.clear()
        self.cancel()
        return INTERRUPTED

    def _detach(self) -> int:
        self.screen.talk(f"run {self.run} goes on; `dalsegno logs -f {self.run}` follows it again")
        return 0


def _nothing() -> None: ...


def _one_place() -> bool:
    """Whether output and errors go to the same terminal or file: what stands in the one is then seen in the other."""
    try:
        return os.path.samestat(os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno()))
    except (OSError, ValueError):
        return False


def pause_s(logs: RunLogs) -> float:
    return max(POLL_S, logs.count / FILES_PER_S)


def ask_what_to_do() -> str:
    """d, c or g. A second Ctrl-C, or nobody there to answer, leaves the run in peace."""
    try:
        with interruptible():
            while True:
                click.echo("\ndetach (d), cancel (c), go on (g)? [d] ", nl=False, err=True)
                _wait_for_a_line()
                answer = (input().strip().lower() or "d")[0]
                if answer in "dcg":
                    return answer
    except (KeyboardInterrupt, EOFError):
        click.echo("", err=True)
        return "d"


def _wait_for_a_line() -> None:
    """In short turns: a Ctrl-C that comes just before a read begins would be heard only when that has ended."""
    while not select.select([sys.stdin], [], [], POLL_S)[0]:
        pass


def follower_of(run: RunFolder, slurm: SlurmHere) -> Follower:
    """One who shows all of a run from its beginning."""
    from dalsegno.cli.cancel import cancel_run
    from dalsegno.runs.submit.prepare import read_plan

    plan = read_plan(run)
    watch, screen = watch_of(run, slurm, plan), Screen(ranks_of(plan), story=run.journal)
    return Follower(run.run, RunLogs(run), watch, screen, lambda: cancel_run(run), partial(end_hint, run))


def ranks_of(plan: RunPlan) -> int:
    """How many a generation has at most."""
    return plan.shape.max_nodes * plan.shape.nproc_per_node


def watch_of(run: RunFolder, slurm: SlurmHere, plan: RunPlan) -> RunWatch:
    from dalsegno.cluster import is_gone
    from dalsegno.recovery.client import controller_answers

    controller = slurm.controller
    answers = (lambda: controller_answers(controller)) if controller else (lambda: False)
    no_cluster = partial(is_gone, slurm.env, plan.cluster)
    return RunWatch(run, slurm.client, on_head=plan.on_head, answers=answers, no_cluster=no_cluster)
