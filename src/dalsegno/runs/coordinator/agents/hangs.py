"""Detect hangs, and ranks that stay idle.

In a script that reports steps, a hang is a step that takes too long. In any other script, a hang is a long time without
output in which no rank is at work (`activity.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from statistics import median

from dalsegno.runs import journal
from dalsegno.runs.coordinator.agents.activity import (
    SILENCE,
    SILENCE_WITHOUT_OUTPUT,
    Activity,
    AskTurns,
    Idle,
    ask_interval_s,
    describe_work,
)
from dalsegno.runs.coordinator.agents.messages import WorkerActivity
from dalsegno.runs.coordinator.generations.events import Event, Hung, WorkerEnded
from dalsegno.runs.coordinator.generations.generations import GenerationPhase, Run
from dalsegno.runs.coordinator.nodes.node_source import RunControl
from dalsegno.runs.hang import HangReport, read_hang
from dalsegno.runs.journal import RunEvent
from dalsegno.spec.facts import facts_to_json

TIMES_THE_MEDIAN = 10
MIN_TIMEOUT_S = 60.0
ENOUGH_STEPS = 5  # steps needed for a useful median, because the first steps compile and warm up
KEPT = 100  # number of step durations from which the median is computed
IDLE_S = 30.0  # ranks that stay idle for this long after others have returned are reported
ALL_IDLE_S = 600.0  # time after which a run whose ranks are all idle is reported
log = logging.getLogger("coordinator")


class StepMarks:
    """The steps of one generation.

    The generation hangs if no step completes for `timeout_s`. 0 means no limit. With None, the limit is derived from
    the median duration.
    """

    def __init__(self, timeout_s: float | None, now: float) -> None:
        self.timeout_s = timeout_s
        self.last = now
        self._steps: list[float] = []
        self._newest = -1
        self._over = False

    def step(self, number: int, now: float) -> bool:
        """Record a step when the first rank reaches it; return whether it is the first step."""
        is_first = self._newest < 0
        if number <= self._newest:
            return False
        if not is_first:
            self._steps = [*self._steps, now - self.last][-KEPT:]
        self._newest, self.last = number, now
        return is_first

    def stop_timer(self) -> None:
        """Stop the timer. No more steps follow, only a last save or an evaluation."""
        self._over = True

    @property
    def has_steps(self) -> bool:
        return self._newest >= 0

    def limit_s(self) -> float | None:
        if self._over:
            return None
        if self.timeout_s is not None:
            return self.timeout_s or None
        if len(self._steps) < ENOUGH_STEPS:
            return None
        return max(MIN_TIMEOUT_S, TIMES_THE_MEDIAN * median(self._steps))

    def overdue_s(self, now: float) -> float | None:
        """Return the time since the last step if it exceeds the limit, otherwise None."""
        limit = self.limit_s()
        return now - self.last if limit is not None and now - self.last > limit else None


class HangVerdict(Enum):
    PROGRESS = "progress"
    SILENT_WORK = "silent work"  # no step and no output for too long, but ranks are at work
    ALL_IDLE = "all idle"  # no step, no output and no work for long, while no limit is known; the run is not ended
    HANG = "hang"


def judge_progress(
    marks: StepMarks, output_at: float, work_at: float, now: float, all_idle_s: float = ALL_IDLE_S
) -> HangVerdict:
    """Return the verdict on a generation from its steps, its last output, and the last time a rank was at work.

    A script that reports steps hangs if no step completes within the limit, even if its ranks are at work. Any other
    script hangs if, within the limit, it writes nothing and no rank is at work. One rank at work is enough to
    prevent that verdict, because the other ranks may wait for it.
    """
    limit_s = marks.limit_s()
    if limit_s is None:
        quiet_s = now - max(marks.last, output_at, work_at)
        return HangVerdict.ALL_IDLE if marks.timeout_s != 0 and quiet_s > all_idle_s else HangVerdict.PROGRESS
    if marks.overdue_s(now) is None:
        return HangVerdict.PROGRESS
    if marks.has_steps:
        return HangVerdict.HANG
    if now - output_at <= limit_s:
        return HangVerdict.PROGRESS
    return HangVerdict.HANG if now - work_at > limit_s else HangVerdict.SILENT_WORK


# Hangs: capture the stacks, then end the generation so that the next one can start


STACKS_S = 10.0  # timeout for a node to capture the stacks of its workers, which takes at most 7 s


class HangWatch:
    """Detects hangs and idle ranks in each generation of the run.

    The evidence is in the run folder, and reports go to the journal. `dalsegno torchrun` has neither, and overrides the
    public methods at the end of this class.
    """

    sees_output = True  # whether `RunControl.last_output` knows when ranks write

    def __init__(
        self,
        control: RunControl,
        timeout_s: float | None,
        stacks_s: float = STACKS_S,
        idle_s: float = IDLE_S,
        all_idle_s: float = ALL_IDLE_S,
    ) -> None:
        self._control, self._timeout_s, self._stacks_s = control, timeout_s, stacks_s
        self._idle_s, self._all_idle_s = idle_s, all_idle_s
        self._asked: set[str] = set()  # agents that have not captured their workers' stacks yet
        self._all_done = asyncio.Event()
        self._deferred: list[WorkerEnded] = []  # worker ends that are applied once the stacks are captured
        self.generation_started()

    def generation_started(self) -> None:
        self._began = time.monotonic()
        self._marks, self._hanging = StepMarks(self._timeout_s, self._began), False
        self._activity, self._turns = Activity(), AskTurns(self._began)
        self._output_at = self._look_at_output_at = 0.0
        self._noted_work = False
        self._idle_at: float | None = None  # when idle ranks were reported; infinity while their stacks are captured
        self._stalled_at: float | None = None  # the time of the last step when a hang was reported but not ended

    @property
    def age_s(self) -> float:
        """The age of the current generation."""
        return time.monotonic() - self._began

    def stepped(self, generation: int, step: int) -> None:
        """Record a step. Write the first step of a generation to the journal, because the run trains from then on."""
        if generation == self._control.run.generation and self._marks.step(step, time.monotonic()):
            self._control.journal(RunEvent.FIRST_STEP, generation=generation, step=step)

    def stop_timer(self, generation: int) -> None:
        """Stop the timer, because the script has no more steps to do."""
        if generation == self._control.run.generation:
            self._marks.stop_timer()

    def check(self) -> None:
        """Check for hangs and idle ranks. Call this periodically."""
        run = self._control.run
        if run.phase is not GenerationPhase.RUNNING or self._hanging or run.group is None:
            return
        now, limit_s = time.monotonic(), self._idle_limit_s(run)
        interval_s = ask_interval_s(limit_s or 0.0, len(run.group.agents))
        if limit_s:
            for agent in self._turns.due(run.group.agents, interval_s, now):
                self._control.send(agent, {"work": run.generation})
        self._look_for_idle(run, now)
        self._look_for_steps()
        verdict = self._judge(run, now, interval_s)
        if verdict is HangVerdict.HANG and self.may_end():
            self._hanging = True
            self._control.run_in_background(self._end(run.generation, self._describe_hang(now)))
        elif verdict is HangVerdict.HANG and self._stalled_at is None:
            self._stalled_at = self._marks.last
            self._control.run_in_background(self._report_stall(run.generation, self._describe_hang(now)))
        elif verdict is HangVerdict.SILENT_WORK and not self._noted_work:
            self._note_work(run, now)
        elif verdict is HangVerdict.ALL_IDLE and not run.done and self._idle_at is None:
            self._report_idle(run, sorted(run.group.ranks), now - self._progress_at)

    def _idle_limit_s(self, run: Run) -> float | None:
        """Return how long the ranks may be idle; None if their activity is not needed."""
        limits = [self._idle_s] if run.done else []
        limit_s = self._marks.limit_s()
        if limit_s is None:
            limits += [self._all_idle_s] if self._timeout_s != 0 else []
        elif not self._marks.has_steps:
            limits.append(limit_s)
        return min(limits, default=None)

    @property
    def _progress_at(self) -> float:
        """The time of the last known sign of progress."""
        return max(self._marks.last, self._output_at, self._activity.newest)

    def _judge(self, run: Run, now: float, interval_s: float) -> HangVerdict:
        """Return the verdict. The logs of the ranks are checked only if the verdict depends on them.

        They are checked at most as often as agents are queried, because thousands of logs can be on a shared file
        system.
        """
        verdict = self._judge_known(now)
        if verdict is HangVerdict.PROGRESS or (verdict is HangVerdict.HANG and self._marks.has_steps):
            return verdict
        if now < self._look_at_output_at or (verdict is HangVerdict.SILENT_WORK and self._noted_work):
            return HangVerdict.PROGRESS
        self._look_at_output_at = now + interval_s
        self._output_at = self._control.last_output(run.generation)
        return self._judge_known(now)

    def _judge_known(self, now: float) -> HangVerdict:
        return judge_progress(self._marks, self._output_at, self._activity.newest, now, self._all_idle_s)

    def _describe_hang(self, now: float) -> str:
        if self._marks.has_steps:
            return f"no step for {now - self._marks.last:.0f} s"
        quiet_s = now - max(self._marks.last, self._output_at)
        idle_s = now - max(self._activity.newest, self._began)
        return f"{self._silence} for {quiet_s:.0f} s, and no rank was at work for {idle_s:.0f} s"

    @property
    def _silence(self) -> str:
        return SILENCE if self.sees_output else SILENCE_WITHOUT_OUTPUT

    def _note_work(self, run: Run, now: float) -> None:
        """Say why a generation without steps and output is not ended.

        If `sees_output` is false, do this only if some ranks are at work while others are idle.
        """
        assert run.group is not None
        ranks = run.group.ranks - run.done
        idle = self._activity.idle_ranks(ranks, now - (self._marks.limit_s() or 0.0) / 2)
        where = {rank: self.name_of(run.group.agent_of(rank)) for rank in idle}
        quiet_s = now - max(self._marks.last, self._output_at)
        if self.sees_output or 0 < len(idle) < len(ranks):
            self._noted_work = True
            self.tell(f"{self._silence} for {quiet_s:.0f} s, but {describe_work(len(ranks) - len(idle), where)}")

    def _look_for_idle(self, run: Run, now: float) -> None:
        """Report ranks that are idle after others have returned, and reported ranks that are at work again.

        A run with idle ranks may never end, but it is not stopped.
        """
        if self._idle_at is not None:
            if self._progress_at > self._idle_at:
                self._idle_at, text = None, "ranks that were idle are at work again"
                self.tell(text)
                self._control.journal(RunEvent.IDLE, text=text, generation=run.generation, ranks={})
            return
        left = sorted(run.group.ranks - run.done) if run.group and run.done else []
        idle_s = self._activity.idle_s(left, now)
        if left and idle_s >= self._idle_s:
            self._report_idle(run, left, idle_s)

    def _look_for_steps(self) -> None:
        """Report steps after a hang that was not ended."""
        if self._stalled_at is not None and self._marks.last > self._stalled_at:
            self._stalled_at = None
            self.tell("steps are completed again")

    def _report_idle(self, run: Run, left: Sequence[int], idle_s: float) -> None:
        self._idle_at = math.inf  # ignore work until the report is in the journal
        self._control.run_in_background(self._capture_and_report_idle(run, left, idle_s))

    async def _capture_and_report_idle(self, run: Run, left: Sequence[int], idle_s: float) -> None:
        assert run.group is not None
        await self._capture_stacks(run.generation)
        where = {str(rank): self.name_of(run.group.agent_of(rank)) for rank in left}
        stacks = str(self._control.folder.stacks(run.generation, left[0]))
        await self.report_idle(Idle(run.generation, len(run.done), where, round(idle_s), stacks))
        if run.generation == self._control.run.generation:
            self._idle_at = time.monotonic()

    def worked(self, generation: int, ranks: Mapping[int, WorkerActivity]) -> None:
        """Record the activity of a node's workers."""
        if generation == self._control.run.generation:
            for rank, work in ranks.items():
                self._activity.record(rank, work, time.monotonic())

    async def _end(self, generation: int, what: str) -> None:
        why = self.reason_to_end(what)
        self._control.note(why)
        await self._capture_stacks(generation)
        await self._explain(generation, what)
        self._control.apply(Hung(generation, why, self.age_s))

    async def _report_stall(self, generation: int, what: str) -> None:
        await self._capture_stacks(generation)
        run = self._control.run
        if run.generation == generation and run.phase is GenerationPhase.RUNNING:  # the capture takes up to 10 s
            await self._explain(generation, f"{what}; the workers continue")

    async def _explain(self, generation: int, what: str = "") -> None:
        self.report_hang(what, await self.find_cause(generation))

    async def find_cause(self, generation: int, idle: Collection[int] | None = None) -> HangReport | None:
        """Return why a generation hangs; None if there is no evidence. The event loop is not blocked meanwhile.

        `idle` contains the ranks that have not returned, if they are all idle.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(None, self.diagnose, generation, idle)
        except Exception as error:  # a hang must be ended even if its cause cannot be found
            log.warning("could not find the cause of the hang: %s: %s", type(error).__name__, error)
            return None

    def defer(self, event: Event) -> bool:
        """Defer the end of a worker after a collective has timed out in a rank; return whether the event was deferred.

        The event would end the generation and kill the other ranks, so their stacks are captured first.
        """
        run = self._control.run
        if not isinstance(event, WorkerEnded) or event.failure is None or event.generation != run.generation:
            return False
        if self._deferred:
            self._deferred.append(event)
            return True
        if self._hanging or run.phase is not GenerationPhase.RUNNING or not event.failure.timed_out:
            return False
        self._hanging, self._deferred = True, [event]
        self._control.run_in_background(self._end_timed_out(event.generation))
        return True

    async def _end_timed_out(self, generation: int) -> None:
        await self._capture_stacks(generation)
        await self._explain(generation)
        events, self._deferred = self._deferred, []
        for event in events:
            self._control.apply(event)

    async def _capture_stacks(self, generation: int) -> None:
        """Capture the stacks on all nodes at once, before the workers are killed."""
        group = self._control.run.group
        self._asked = set(group.agents) & self._control.present if group else set()
        self._all_done.clear()
        for agent in self._asked:
            self._control.send(agent, {"stacks": generation})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._all_done.wait(), self._stacks_s)

    def stacks_done(self, agent: str) -> None:
        """Record that an agent has captured the stacks, or is lost."""
        self._asked.discard(agent)
        if not self._asked:
            self._all_done.set()

    # The evidence and the reports of `dalsegno run`

    def may_end(self) -> bool:
        """Return whether a generation that hangs is ended. Otherwise, the hang is only reported."""
        return True

    def name_of(self, agent: str) -> str:
        """Return the name of an agent's node, for the user."""
        return agent

    def reason_to_end(self, what: str) -> str:
        """Return why a generation is ended, for the user. `what` says how the hang was detected."""
        return f"{what}; stacks of the ranks: {self._control.folder.all_stacks}"

    def diagnose(self, generation: int, idle: Collection[int] | None) -> HangReport | None:
        """Find the cause, as `find_cause`. Called in another thread."""
        folder = self._control.folder
        return read_hang(folder, generation, list(journal.read(folder.journal)))

    def tell(self, text: str) -> None:
        """Show a line to the user."""
        self._control.note(text)

    def report_hang(self, what: str, report: HangReport | None) -> None:
        """Report why a generation hangs. `what` says how it was detected; "" if a collective has timed out."""
        if report is not None:
            self._control.note(report.describe())
            self._control.journal(RunEvent.HUNG, text=report.describe(), **facts_to_json(report))

    async def report_idle(self, idle: Idle) -> None:
        self._control.note(idle.sentence())
        self._control.journal(RunEvent.IDLE, text=idle.sentence(), **dataclasses.asdict(idle))
