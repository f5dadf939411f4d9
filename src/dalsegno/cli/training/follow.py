"""Follow a run to its end: print its output and status, and handle Ctrl-C."""

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
from dalsegno.cli.training.statusline import (
    NOTHING,
    Cause,
    cause_was_shown,
    describe_changes,
    describe_end,
    last_cause,
    live_text,
    new_generations,
)
from dalsegno.cli.training.watch import RunWatch
from dalsegno.printable import lines
from dalsegno.runs import journal
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.logs import Line, Repeats, RunLogs
from dalsegno.runs.status import RunCause, RunPhase, RunStatus, is_over
from dalsegno.slurm.parse.messages import SlurmRefusal, parse_refusal
from dalsegno.system.files import read_text
from dalsegno.train.contract import TERMINATED

if TYPE_CHECKING:
    from dalsegno.cluster import SlurmHere
    from dalsegno.runs.submit.plan import RunPlan


_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow")
_REDRAW_S = 0.5


def format_line(line: Line, ranks: int, colour: bool = False, *, foreign: bool = False) -> str:
    """Return a line such as `[ 3] text`, with the rank padded to the width of the largest one. With a single rank there
    is no prefix. With `foreign`, escape unprintable characters."""
    shown = line.text.rstrip("\r").rpartition("\r")[2]  # only the final state of a progress bar is shown
    shown = lines(shown) if foreign else shown
    if ranks <= 1:
        return shown
    mark = f"[{line.rank:>{len(str(ranks - 1))}}] "
    return (out.style(mark, fg=_COLOURS[line.rank % len(_COLOURS)]) if colour else mark) + shown


class Screen:
    """The output of a run: its lines on stdout, and a message on stderr for each change of its status. A terminal also
    shows the current status in a line that is redrawn."""

    def __init__(
        self, ranks: int, *, story: Path | None = None, quiet: bool = False, bare: bool = False, foreign: bool = False
    ) -> None:
        """Create a screen.

        `story` is the run's journal; `quiet` turns off our own messages; `bare` leaves out the rank prefix; `foreign`
        is for another user's run, whose output must not control this terminal.
        """
        self._story = story
        self._foreign = foreign
        self.ranks = ranks  # number of ranks in the largest generation so far
        self._bare = bare
        self._quiet = quiet
        self._live = sys.stderr.isatty() and not quiet
        self._colour = sys.stdout.isatty()
        self._shown: RunStatus | None = None
        self._notes = 0  # number of notes in the journal that were reported
        self._announced = 0  # the last generation that was reported
        self._drawn = ""
        self._drawn_at = 0.0

    def lines(self, lines: Iterable[Line], news: Callable[[], None] = lambda: None) -> None:
        """Print output lines as UTF-8 in every locale.

        Before the first line of a new generation, report that generation: call `news`, then read the journal for
        generations that `news` did not report.
        """
        sys.stdout.flush()
        for line in lines:
            if line.generation > self._announced:
                sys.stdout.buffer.flush()
                news()
                self.generations(line.generation)
            self.clear()
            self.ranks = max(self.ranks, (line.rank or 0) + 1)
            text = format_line(line, 1 if self._bare else self.ranks, self._colour, foreign=self._foreign)
            sys.stdout.buffer.write(text.encode("utf-8", "replace") + b"\n")
        sys.stdout.buffer.flush()

    def status(self, status: RunStatus, now: float) -> None:
        self.ranks = max(self.ranks, status.world_size)
        changed = status != self._shown
        news = describe_changes(self._shown, status, self._cause(), self._announced) if changed else []
        self._shown = status
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
        """Report generations that began and ended between two reads of the status."""
        story = list(journal.read(self._story)) if self._story and not self._quiet else []
        for number, text in new_generations(story, self._announced, cause_was_shown(self._shown)).items():
            if number <= up_to:
                self._announced = number
                self.talk(text)
        self._announced = max(self._announced, up_to if up_to < sys.maxsize else 0)

    def notes(self) -> None:
        """Report new notes in the journal. The status holds only the last note, and a poll may miss it.

        Many nodes may send the same note at the same time, so equal notes of one read are printed once.
        """
        noted = (
            [entry for entry in journal.read(self._story) if entry.get("event") == RunEvent.NOTE] if self._story else []
        )
        for text in dict.fromkeys(str(entry.get("text")) for entry in noted[self._notes :]):
            self.talk(text)
        self._notes = max(self._notes, len(noted))

    def _cause(self) -> Cause:
        return last_cause(journal.read(self._story)) if self._story else NOTHING

    def talk(self, text: str) -> None:
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


@dataclass
class PendingSignal:
    """The signal to handle after the current poll, so that no output line is cut; 0 for none."""

    number: int = 0

    def take(self) -> int:
        number, self.number = self.number, 0
        return number

    def put(self, number: int, _frame: FrameType | None) -> None:
        # If a second signal arrives before the first is handled, the process probably hangs, for example on a full
        # pipe. KeyboardInterrupt interrupts it at once.
        if self.number:
            raise KeyboardInterrupt
        self.number = number


@contextmanager
def collect_signals(*numbers: int) -> Iterator[PendingSignal]:
    inbox = PendingSignal()
    before = {number: signal.signal(number, inbox.put) for number in numbers}
    try:
        yield inbox
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_HINTS = {
    SlurmRefusal.MEMORY: "no node has that much memory: `sinfo -N -o '%N %m'` shows it in MiB; use a smaller `--mem`",
    SlurmRefusal.FEATURE: "`sinfo -N -o '%N %f'` lists the features for `--constraint`",
    SlurmRefusal.NODE_NAME: "`sinfo -N` lists the nodes for `--exclude`",
    SlurmRefusal.ACCOUNT: "`sacctmgr show associations user=$USER` lists your values for `--account` and `--partition`",
    SlurmRefusal.QOS: "`sacctmgr show associations user=$USER format=account,qos` lists your values for `--qos`",
    SlurmRefusal.TIME_LIMIT: "`sinfo -o '%P %l'` shows the partitions' time limits; use a shorter `--time`",
    SlurmRefusal.POLICY: "`sacctmgr show qos` and `sacctmgr show associations` show the limits",
    SlurmRefusal.NO_SUCH_NODES: "no nodes match all options: `sinfo -N -o '%N %c %m %G %f'` shows what the nodes have",
}


def end_hint(run: RunFolder, status: RunStatus) -> str:
    """Return a hint that says where to look after a failed run."""
    if status.cause is not RunCause.REFUSED:
        if _doctor_knows(run, status):
            return f"run `dalsegno doctor {run.run}`: it knows this error and how to fix it"
        spoke = any(run.logs.glob("g*/*"))
        return (
            f"`dalsegno logs {run.run}` shows its output" if spoke else f"`dalsegno why {run.run}` shows what happened"
        )
    log = run.salloc_log(1)
    refusal = parse_refusal(f"{read_text(log) or ''}{status.message}")
    return _HINTS.get(refusal, f"Slurm's full message is in {log}")


def _doctor_knows(run: RunFolder, status: RunStatus) -> bool:
    """Return whether the run failed with an error that `dalsegno doctor` explains, or hung."""
    from dalsegno.doctor.logs import find_signs

    if any(find_signs(enumerate(f"{status.report}\n{status.message}".splitlines(), 1), run.run)):
        return True
    return any(entry.get("event") == RunEvent.HUNG for entry in journal.read(run.journal))


POLL_S = 0.1
FILES_PER_S = 1000  # limit for opening logs, possibly on a shared file system: each poll opens every log once


@dataclass
class Follower:
    """The follower of one run on one screen. `cancel` ends the run."""

    run: str
    logs: RunLogs
    watch: RunWatch
    screen: Screen
    cancel: Callable[[], None]
    hint: Callable[[RunStatus], str]  # returns a hint that says where to look after a failed run
    repeats: Repeats = field(default_factory=Repeats)

    def follow(self) -> int:
        """Follow the run to its end and return its exit code. Return 0 if the user detaches. If Ctrl-C cancels the run,
        or SIGTERM ends this process, return the signal's code."""
        try:
            with collect_signals(signal.SIGINT, signal.SIGTERM) as inbox:
                return self._until_end(inbox)
        except KeyboardInterrupt:
            return self._detach()
        except BrokenPipeError:
            self._detach()
            raise
        finally:
            self.screen.clear()

    def _until_end(self, inbox: PendingSignal) -> int:
        while True:
            now = time.time()
            # poll before reading the logs, so that all output is printed before the last status
            status = self.watch.poll(now)
            report = partial(self.screen.status, status, now) if not is_over(status) else _nothing
            self.screen.lines(self.repeats.once(self.logs.lines(now, final=is_over(status))), news=report)
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
            out.talk(describe_end(status))
            return 0
        if status.report and not (self.repeats.has_shown(status.report) and _same_destination()):
            out.talk(status.report.rstrip("\n"))
        out.error(describe_end(status), hint=self.hint(status))
        return status.exit_code or 1

    def _answer(self, number: int) -> int | None:
        """Handle a signal; return the exit code to leave with, or None to continue."""
        if not number:
            return None
        if number == signal.SIGTERM:
            self._detach()
            return TERMINATED
        if not (sys.stdin.isatty() and sys.stderr.isatty()):  # in a script, Ctrl-C cancels the run without asking
            return self._cancel()
        self.screen.clear()
        wish = ask_what_to_do()
        if wish == "c":
            return self._cancel()
        return self._detach() if wish == "d" else None

    def _cancel(self) -> int:
        self.screen.clear()
        self.cancel()
        return INTERRUPTED

    def _detach(self) -> int:
        self.screen.talk(f"run {self.run} continues; `dalsegno logs -f {self.run}` follows it again")
        return 0


def _nothing() -> None: ...


def _same_destination() -> bool:
    """Return whether stdout and stderr go to the same terminal or file."""
    try:
        return os.path.samestat(os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno()))
    except (OSError, ValueError):
        return False


def pause_s(logs: RunLogs) -> float:
    return max(POLL_S, logs.count / FILES_PER_S)


def ask_what_to_do() -> str:
    """Return the user's choice: d, c or g. A second Ctrl-C, or the end of input, means d: the run continues."""
    try:
        with interruptible():
            while True:
                click.echo("\ndetach (d), cancel (c), keep going (g)? [d] ", nl=False, err=True)
                _wait_for_a_line()
                answer = (input().strip().lower() or "d")[0]
                if answer in "dcg":
                    return answer
    except (KeyboardInterrupt, EOFError):
        click.echo("", err=True)
        return "d"


def _wait_for_a_line() -> None:
    """Wait for input in short intervals, so that Ctrl-C takes effect at once. A blocking read could delay it."""
    while not select.select([sys.stdin], [], [], POLL_S)[0]:
        pass


def follower_of(run: RunFolder, slurm: SlurmHere) -> Follower:
    """Return a follower that shows a run from its beginning."""
    from dalsegno.cli.training.cancel import cancel_run
    from dalsegno.runs.submit.prepare import read_plan

    plan = read_plan(run)
    watch, screen = watch_of(run, slurm, plan), Screen(ranks_of(plan), story=run.journal)
    return Follower(run.run, RunLogs(run), watch, screen, lambda: cancel_run(run), partial(end_hint, run))


def ranks_of(plan: RunPlan) -> int:
    """Return the largest number of ranks that a generation can have."""
    return plan.shape.max_nodes * plan.shape.nproc_per_node


def watch_of(run: RunFolder, slurm: SlurmHere, plan: RunPlan) -> RunWatch:
    from dalsegno.cluster import is_gone
    from dalsegno.recovery.client import controller_answers

    controller = slurm.controller
    answers = (lambda: controller_answers(controller)) if controller else (lambda: False)
    no_cluster = partial(is_gone, slurm.env, plan.cluster)
    return RunWatch(run, slurm.client, on_head=plan.on_head, answers=answers, no_cluster=no_cluster)
