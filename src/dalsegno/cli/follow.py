"""Following a run to its end: its lines, its status, and what to do when the user has seen enough."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.interrupts import INTERRUPTED, interruptible
from dalsegno.cli.refusals import end_hint
from dalsegno.cli.screen import Screen
from dalsegno.cli.signals import Inbox, noted
from dalsegno.cli.statusline import farewell
from dalsegno.cli.watch import Watch, is_over
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.logs import Repeats, RunLogs
from dalsegno.runs.status import Status
from dalsegno.train.contract import TERMINATED

if TYPE_CHECKING:
    from dalsegno.cluster import SlurmHere
    from dalsegno.runs.submit.plan import RunPlan

POLL_S = 0.1
FILES_PER_S = 1000  # each look opens every log once, and others use the file system too


@dataclass
class Follower:
    """One run on one screen. `cancel` ends the run."""

    run: str
    logs: RunLogs
    watch: Watch
    screen: Screen
    cancel: Callable[[], None]
    hint: Callable[[Status], str]  # where to look after an end that is not a good one
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

    def _end(self, status: Status) -> int:
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


def watch_of(run: RunFolder, slurm: SlurmHere, plan: RunPlan) -> Watch:
    from dalsegno.cluster import is_gone
    from dalsegno.recovery.client import controller_answers

    controller = slurm.controller
    answers = (lambda: controller_answers(controller)) if controller else (lambda: False)
    no_cluster = partial(is_gone, slurm.env, plan.cluster)
    return Watch(run, slurm.client, on_head=plan.on_head, answers=answers, no_cluster=no_cluster)
