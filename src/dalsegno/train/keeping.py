"""What a run keeps: snapshots in memory, and their way to disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple

from dalsegno.train.agent import AgentLink
from dalsegno.train.errors import NoRoom
from dalsegno.train.memory.alive import hold
from dalsegno.train.memory.draft import Draft
from dalsegno.train.memory.room import stated
from dalsegno.train.memory.slots import Slots, needs_bytes
from dalsegno.train.moving import Mover, Moving
from dalsegno.train.request import Request, Terms
from dalsegno.train.saver import save_here
from dalsegno.train.saving import Result, Saver
from dalsegno.train.state import State

UNHEARD = (
    "parameters change without an optimizer's step() being heard (a CUDA graph, weights that are swapped by hand):"
    " snapshots are copied while the training waits from now on. Before a swap, call settle()"
)
SLOTS = 3  # one is complete, one is being written, one may be on its way to disk


class _Open(NamedTuple):
    """A snapshot whose tensors are still being copied."""

    draft: Draft
    moving: Moving
    save: bool
    call_s: float  # that the training stood still for until now


@dataclass
class Counted:
    """What came of it all, for whoever wants to know."""

    snapshots: int = 0
    skipped: int = 0
    stall_s: float | None = None  # of the last snapshot
    saves: int = 0
    overtaken: int = 0
    save_s: float = 0.0


class Keeping:
    """Of one rank in one generation."""

    def __init__(
        self,
        terms: Terms,
        agent: AgentLink | None,
        resumed: int | None,
        ranks_here: int,
        warn: Callable[[str], None],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.counted = Counted()
        self.failed = False  # the last save did
        self._terms, self._agent, self._warn, self._say, self._ranks_here = terms, agent, warn, say, ranks_here
        self._slots: Slots | None = None
        alive: list[int] = []
        try:
            if terms.sweep:
                alive.append(hold(terms.run, terms.rank))
            self._slots = Slots(terms.run, terms.rank, terms.generation, resumed, count=SLOTS, ranks=ranks_here)
        except NoRoom as error:
            self._go_without(error)
        self._alive, self._saver = alive, Saver(terms.rank, agent, alive)
        self._mover = Mover()
        self._open: _Open | None = None
        self._prepared = False
        self._warned: set[str] = set()
        self._alone = False  # the training waits for every copy
        self._dropped: list[Result] = []

    def keep(self, state: State, steady: Container[int], save: bool) -> None:
        """Copy the state into memory, and have it saved from there. Without a slot for it, it is saved here and now.

        `steady`: the addresses of tensors that only an optimizer's step changes.
        """
        self.settle(wait=True)
        self._prepare(state)
        began = time.monotonic()
        draft = self._begin(state)
        if draft is not None:
            moving = self._mover.move(draft, steady)
            self._open = _Open(draft, moving, save, time.monotonic() - began)
            self.settle(wait=False)
        elif save:
            words: list[str] = []
            why = save_here(Request(self._terms, state.step, ""), state, words.append)
            self._note(Result(state.step, "", time.monotonic() - began, why, words=tuple(words)))
        else:
            self.counted.skipped += 1

    def step_done(self) -> None:
        """What was being copied has been there for a whole step."""
        self._mover.trust.step_done()
        self.settle(wait=self._mover.trust.lost)

    def settle(self, wait: bool) -> None:
        """Commit a snapshot once all of it is there."""
        if self._open is None or not (wait or self._open.moving.done()):
            return
        opened, self._open = self._open, None
        began = time.monotonic()
        opened.moving.wait()
        self._mover.trust.let_go()
        if self._mover.trust.lost and not self._alone:
            self._drop(opened)
            return
        self.counted.stall_s = opened.call_s + self._mover.waited_s() + (time.monotonic() - began)
        record, path = opened.draft.commit(), str(opened.draft.slot.path)
        self.counted.snapshots += 1
        if self._agent is not None:
            told = {"rank": record.rank, "step": record.step, "path": path}
            self._agent.tell({"snapshot": told, "generation": record.generation})
        if opened.save:
            self._saver.ask(Request(self._terms, record.step, path))

    def _drop(self, opened: _Open) -> None:
        """The copy that was under way when trust was lost: its slot holds nothing. Those after it are made alone."""
        self._alone = True
        self._warn(UNHEARD)
        self.counted.skipped += 1
        if opened.save:
            self._dropped.append(Result(opened.draft.record.step, "", 0.0, "it changed while it was copied"))

    def hear(self) -> bool:
        """What came of earlier saves; says whether one has failed."""
        results, self._dropped = [*self._dropped, *self._saver.results()], []
        for result in results:
            self._note(result)
        return any(result.why and not result.overtaken for result in results)

    def wait(self, step: int, timeout_s: float) -> bool:
        """Until the save of that step is done; says whether it is on disk."""
        self.settle(wait=True)
        if step in self._saver.busy.values():  # else it was saved here, while an earlier one may still be under way
            self._note(self._saver.wait(step, timeout_s))
        return not self.failed

    @property
    def busy(self) -> bool:
        """A save is under way, or about to be."""
        return bool(self._saver.busy) or (self._open is not None and self._open.save)

    @property
    def left_to_saver(self) -> bool:
        """A saver was started: it removes what is in memory when it has done its last work."""
        return self._saver.started

    def close(self) -> None:
        self.settle(wait=True)
        self._mover.close()
        self._saver.close()
        if self._slots is not None:
            self._slots.close()
        while self._alive:
            os.close(self._alive.pop())

    def _begin(self, state: State) -> Draft | None:
        """A state that has outgrown its slots may find no room for larger ones."""
        try:
            return self._slots.begin(state, spare=self._saver.busy) if self._slots is not None else None
        except NoRoom as error:
            self._go_without(error)
            return None

    def _go_without(self, error: NoRoom) -> None:
        self._warn(f"{error}; every save now stops the training while it is written")
        if self._slots is not None:
            self._slots.close()
        self._slots = None

    def _prepare(self, state: State) -> None:
        """Memory is found, touched and pinned before the first snapshot, which would else seem ten times as dear."""
        if self._slots is None or self._prepared:
            return
        try:
            self._slots.prepare(state)
        except NoRoom as error:
            self._go_without(error)
            return
        self._mover.prepare(self._slots.slots, state)
        self._prepared = True
        if self._agent is not None:
            needed = self._ranks_here * needs_bytes(state, SLOTS)
            self._say(f"in memory {stated(needed, SLOTS, self._ranks_here)}")

    def _note(self, result: Result) -> None:
        for words in set(result.words) - self._warned:
            self._warned.add(words)
            self._warn(words)
        if result.overtaken:
            self._note_overtaken(result.step)
            return
        self.failed = bool(result.why)
        if result.why:
            self._warn(f"step {result.step} was not saved: {result.why}. The training goes on; it will be tried again")
        else:
            self.counted.saves += 1
            self.counted.save_s = result.seconds

    def _note_overtaken(self, step: int) -> None:
        """Nothing is wrong but the interval; once is enough, and the first rank speaks for all."""
        self.counted.overtaken += 1
        if self.counted.overtaken == 1 and self._terms.rank == 0:
            self._warn(f"step {step} was given up for a newer one: a save takes longer than disk_every")
