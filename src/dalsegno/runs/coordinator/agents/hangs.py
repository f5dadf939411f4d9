"""Detect hangs (no step for too long) and ranks that stay idle after other ranks have returned."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from dalsegno.runs import journal
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
BUSY_SHARE = 0.02  # share of one CPU; threads that only wait use less
BUSY_BYTES = 1 << 20
log = logging.getLogger("coordinator")


class StepMarks:
    """The steps of one generation.

    A hang is `timeout_s` without a step. 0 means no limit; with None, it is derived from the median.
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
            self._steps = [*self._steps[-KEPT:], now - self.last]
        self._newest, self.last = number, now
        return is_first

    def stop_timer(self) -> None:
        """Stop the timer. No more steps follow, only a last save or an evaluation."""
        self._over = True

    def record_output(self, at: float) -> None:
        """Record output as progress, for scripts that report no steps."""
        if not self._steps:
            self.last = max(self.last, at)

    def limit_s(self) -> float | None:
        if self._over:
            return None
        if self.timeout_s is not None:
            return self.timeout_s or None
        if len(self._steps) < ENOUGH_STEPS:
            return None
        return max(MIN_TIMEOUT_S, TIMES_THE_MEDIAN * median(self._steps))

    def overdue_s(self, now: float) -> float | None:
        """Return the time since the last step if it exceeds the limit, else None."""
        limit = self.limit_s()
        return now - self.last if limit is not None and now - self.last > limit else None


class Activity:
    """The activity of the ranks that have not returned, as reported by their nodes."""

    def __init__(self) -> None:
        # rank -> its counters when it was last active, and the time
        self._last: dict[int, tuple[WorkerActivity, float]] = {}

    def record(self, rank: int, work: WorkerActivity, now: float) -> None:
        before, at = self._last.get(rank, (None, now))
        if before is None or _is_busy(before, work, now - at):
            self._last[rank] = work, now

    def idle_s(self, ranks: Collection[int], now: float) -> float:
        """Return how long all of these ranks have been idle; 0 if one of them has not been reported yet."""
        return min((now - self._last[rank][1] if rank in self._last else 0.0 for rank in ranks), default=0.0)


def _is_busy(before: WorkerActivity, now: WorkerActivity, passed_s: float) -> bool:
    return now.cpu_s - before.cpu_s > BUSY_SHARE * max(1.0, passed_s) or now.moved - before.moved > BUSY_BYTES


# Hangs: capture the stacks, then end the generation so that the next one can start


ASK_S = 5.0  # interval between two queries for the activity of ranks that have not returned
STACKS_S = 10.0  # timeout for a node to capture its stacks, which takes at most 7 s


@dataclass(frozen=True)
class Idle:
    """Some ranks have returned; the others are idle."""

    generation: int
    returned: int
    ranks: Mapping[str, str]  # rank that has not returned -> its node
    idle_s: int
    stacks: str  # the file with the stacks of the first of these ranks

    def sentence(self) -> str:
        names = ", ".join(f"{rank} on {node}" for rank, node in list(self.ranks.items())[:4])
        more = f" and {len(self.ranks) - 4} more" if len(self.ranks) > 4 else ""
        has, ranks = ("has", "rank") if len(self.ranks) == 1 else ("have", "ranks")
        returned = f"{self.returned} rank{'s' if self.returned > 1 else ''} {'have' if self.returned > 1 else 'has'}"
        return (
            f"{returned} returned, but {ranks} {names}{more} {has} not, and {has} done nothing for {self.idle_s} s;"
            f" see {self.stacks}"
        )


class HangWatch:
    """Detects hangs and idle ranks in each generation of the run."""

    def __init__(
        self, control: RunControl, timeout_s: float | None, stacks_s: float = STACKS_S, idle_s: float = IDLE_S
    ) -> None:
        self._control, self._timeout_s, self._stacks_s, self._idle_s = control, timeout_s, stacks_s, idle_s
        self._asked: set[str] = set()  # agents that have not captured their workers' stacks yet
        self._all_done = asyncio.Event()
        self._deferred: list[WorkerEnded] = []  # ends of workers that are applied once the stacks are captured
        self.generation_started()

    def generation_started(self) -> None:
        self._began = time.monotonic()
        self._marks, self._hanging = StepMarks(self._timeout_s, self._began), False
        self._activity, self._asked_at, self._idle_reported = Activity(), self._began, False

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
        """Check for hangs and idle ranks. Called periodically."""
        run = self._control.run
        if run.phase is not GenerationPhase.RUNNING or self._hanging:
            return
        if self._timeout_s:
            self._marks.record_output(self._control.last_output(run.generation))
        self._look_for_idle(run)
        overdue_s = self._marks.overdue_s(time.monotonic())
        if overdue_s is not None:
            self._hanging = True
            self._control.run_in_background(self._end(run.generation, overdue_s))

    def _look_for_idle(self, run: Run) -> None:
        """Report that some ranks have returned and the others are idle, since the run may never end. Do not end it."""
        now, left = time.monotonic(), sorted(run.group.ranks - run.done) if run.group and run.done else []
        if not left or self._idle_reported:
            return
        if now - self._asked_at >= min(ASK_S, self._idle_s / 4):
            self._asked_at = now
            for agent in {run.group.agent_of(rank) for rank in left} if run.group else ():
                self._control.send(agent, {"work": run.generation})
        idle_s = self._activity.idle_s(left, now)
        if idle_s >= self._idle_s:
            self._idle_reported = True
            self._control.run_in_background(self._report_idle(run, left, idle_s))

    async def _report_idle(self, run: Run, left: Sequence[int], idle_s: float) -> None:
        assert run.group is not None
        await self._capture_stacks(run.generation)
        where = {str(rank): run.group.agent_of(rank) for rank in left}
        files = [str(self._control.folder.stacks(run.generation, rank)) for rank in left]
        idle = Idle(run.generation, len(run.done), where, round(idle_s), files[0])
        self._control.note(idle.sentence())
        self._control.journal(RunEvent.IDLE, text=idle.sentence(), **dataclasses.asdict(idle))

    def worked(self, generation: int, ranks: Mapping[int, WorkerActivity]) -> None:
        """Record the activity of a node's workers."""
        if generation == self._control.run.generation:
            for rank, work in ranks.items():
                self._activity.record(rank, work, time.monotonic())

    async def _end(self, generation: int, overdue_s: float) -> None:
        why = f"no step for {overdue_s:.0f} s; stacks of the ranks: {self._control.folder.all_stacks}"
        self._control.note(why)
        await self._capture_stacks(generation)
        await self._explain(generation)
        self._control.apply(Hung(generation, why, self.age_s))

    async def _explain(self, generation: int) -> None:
        report = await asyncio.get_running_loop().run_in_executor(None, self._diagnose, generation)
        if report is not None:
            self._control.note(report.describe())
            self._control.journal(RunEvent.HUNG, text=report.describe(), **facts_to_json(report))

    def defer(self, event: Event) -> bool:
        """Return whether an event is applied later, because a collective has timed out in a rank. The stacks of the
        other ranks are captured first: ending the generation would kill them."""
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

    def _diagnose(self, generation: int) -> HangReport | None:
        folder = self._control.folder
        try:
            return read_hang(folder, generation, list(journal.read(folder.journal)))
        except Exception as error:  # a hang must be ended even if its cause cannot be found
            log.warning("could not find the cause of the hang: %s: %s", type(error).__name__, error)
            return None

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
