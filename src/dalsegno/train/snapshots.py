"""Take snapshots in memory, and let a saver write them to disk."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dalsegno.train.agent import AgentLink
from dalsegno.train.errors import NotEnoughMemory
from dalsegno.train.memory.cuda import Copier
from dalsegno.train.memory.files import hold
from dalsegno.train.memory.free_memory import describe_use
from dalsegno.train.memory.slots import Pair, Slot, Slots, SnapshotDraft, compute_needed_bytes, copy_now
from dalsegno.train.progress import SaveCounts
from dalsegno.train.saver import Request, SaverTerms, save_here
from dalsegno.train.saver_client import Saver, SaveResult
from dalsegno.train.state import TrainingState


class Tensor(Protocol):
    @property
    def _version(self) -> int:
        """The number of in-place changes that torch has counted."""
        ...


class CopyTrust:
    """Decides whether tensors may be copied while training continues.

    This is safe if only an optimizer's step() changes the tensors, because step() waits for the copy.
    """

    def __init__(self) -> None:
        self.lost = False
        self._heard = False  # whether an optimizer's step() was called in the current training step
        self._announced = False  # whether an optimizer's step() was called in the last training step
        self._watched: Sequence[tuple[Tensor, int]] = ()

    @property
    def given(self) -> bool:
        return self._announced and not self.lost

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Record that a copy of these tensors begins."""
        self._watched = [(each, each._version) for each in tensors]

    def announce_change(self) -> None:
        """Record that the copy is complete, and that an optimizer is about to change the tensors."""
        self._heard = True
        self.end_copy()

    def end_copy(self) -> None:
        """Record that the copy is complete. If a tensor has changed in the meantime, the copy is invalid."""
        self.lost = self.lost or any(each._version != version for each, version in self._watched)
        self._watched = ()

    def step_done(self) -> None:
        self.lost = self.lost or (bool(self._watched) and not self._heard)
        self._watched = ()
        self._announced, self._heard = self._heard, False


# Copies of tensors into a slot

SMALL = 16 << 20  # copying fewer bytes than this is faster than starting a thread


class PendingCopy(Protocol):
    def done(self) -> bool: ...

    def wait(self) -> None: ...


class CompletedCopy:
    """A copy that is already complete."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class ThreadCopy:
    """A copy in a thread. Training continues, because torch releases the GIL while it copies."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._copy, args=(pairs,), name="dalsegno-snapshot", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _copy(self, pairs: Sequence[Pair]) -> None:
        try:
            copy_now(pairs)
        except BaseException as error:  # raised again by `wait`
            self._error = error


class TensorCopier:
    """Copies the tensors of a process into slots. Every optimizer's step waits for the running copy."""

    def __init__(self) -> None:
        self._copier: Copier | None = None
        self._beside: ThreadCopy | None = None
        self._waited_s = 0.0
        self.trust = CopyTrust()
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def prepare(self, slots: Sequence[Slot], state: TrainingState) -> None:
        """If tensors are on a GPU, pin all slots before the first snapshot, because pinning is slow."""
        device = next((piece.tensor.device for piece in state.pieces if piece.tensor.is_cuda), None)
        if device is not None:
            self._copier = Copier(device)
            for slot in slots:
                self._copier.pin(slot)

    def move(self, draft: SnapshotDraft, steady: Container[int]) -> PendingCopy:
        """Copy the tensors into the slot. Where this is safe, training continues during the copy.

        `steady` contains the addresses of tensors that only an optimizer's step changes.
        """
        later = [pair for pair in draft.pairs if pair[1].data_ptr() in steady and not pair[1].is_inference()]
        if not self.trust.given or sum(source.nbytes for _, source in later) < SMALL:
            later = []
        self.trust.watch([source for _, source in later])
        if self._copier is not None:
            return self._copier.start(draft, {source.data_ptr() for _, source in later})
        if not later:
            copy_now(draft.pairs)
            return CompletedCopy()
        steady = {source.data_ptr() for _, source in later}
        copy_now(pair for pair in draft.pairs if pair[1].data_ptr() not in steady)
        self._beside = ThreadCopy(later)
        return self._beside

    def waited_s(self) -> float:
        """Return how long optimizers have waited for copies since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def close(self) -> None:
        self._hook.remove()

    def _before_step(self, *ignored: object) -> None:
        """Wait for the copy before an optimizer changes its tensors."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return  # a CUDA graph is being captured, so nothing changes yet and waiting is not allowed
        began = time.monotonic()
        if self._copier is not None:
            self._copier.before_change()
        if self._beside is not None:
            self._beside.wait()
            self._beside = None
        self._waited_s += time.monotonic() - began
        self.trust.announce_change()


# Snapshots of a rank

UNANNOUNCED = (
    "parameters changed without a call of an optimizer's step() (a CUDA graph, or weights swapped by hand):"
    " training now waits for every snapshot. Before a swap, call settle()"
)
SLOTS = 3  # one slot is complete, one is being written, and one is being saved to disk


class _Open(NamedTuple):
    """A snapshot whose tensors are being copied."""

    draft: SnapshotDraft
    moving: PendingCopy
    save: bool
    call_s: float  # how long training has stalled so far


class RankSnapshots:
    """The snapshots and saves of one rank in one generation."""

    def __init__(
        self,
        terms: SaverTerms,
        agent: AgentLink | None,
        resumed: int | None,
        ranks_here: int,
        warn: Callable[[str], None],
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.counted = SaveCounts()
        self.failed = False  # whether the last save failed
        self._terms, self._agent, self._warn, self._notify, self._ranks_here = terms, agent, warn, notify, ranks_here
        self._slots: Slots | None = None
        alive: list[int] = []
        try:
            if terms.sweep:
                alive.append(hold(terms.run, terms.rank))
            self._slots = Slots(terms.run, terms.rank, terms.generation, resumed, count=SLOTS, ranks=ranks_here)
        except NotEnoughMemory as error:
            self._stop_using_memory(error)
        self._alive, self._saver = alive, Saver(terms.rank, agent, alive)
        self._mover = TensorCopier()
        self._open: _Open | None = None
        self._prepared = False
        self._warned: set[str] = set()
        self._alone = False  # whether training waits for every copy, because one of them was invalid
        self._dropped: list[SaveResult] = []

    def keep(self, state: TrainingState, steady: Container[int], save: bool) -> None:
        """Copy the state into memory. With `save`, let the saver write it to disk from there.

        If no slot is free, this process writes the save itself while training waits; without `save`, the snapshot is
        skipped. `steady` contains the addresses of tensors that only an optimizer's step changes.
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
            warnings: list[str] = []
            why = save_here(Request(self._terms, state.step, ""), state, warnings.append)
            self._note(SaveResult(state.step, "", time.monotonic() - began, why, warnings=tuple(warnings)))
        else:
            self.counted.skipped += 1

    def record_verified(self, step: int) -> None:
        """Record a step at which all ranks agreed. All later saves keep the newest checkpoint up to this step."""
        self._terms = replace(self._terms, verified=step)

    def step_done(self) -> None:
        """Record the end of a step, and commit the open snapshot if it is complete."""
        self._mover.trust.step_done()
        self.settle(wait=self._mover.trust.lost)

    def settle(self, wait: bool) -> None:
        """Commit the open snapshot if it is complete. With `wait`, first wait until it is complete."""
        if self._open is None or not (wait or self._open.moving.done()):
            return
        opened, self._open = self._open, None
        began = time.monotonic()
        opened.moving.wait()
        self._mover.trust.end_copy()
        if self._mover.trust.lost and not self._alone:
            self._drop(opened)
            return
        self.counted.stall_s = opened.call_s + self._mover.waited_s() + (time.monotonic() - began)
        record, path = opened.draft.commit(), str(opened.draft.slot.path)
        self.counted.snapshots += 1
        if self._agent is not None:
            snapshot = {"rank": record.rank, "step": record.step, "path": path}
            self._agent.send({"snapshot": snapshot, "generation": record.generation})
        if opened.save:
            self._saver.ask(Request(self._terms, record.step, path))

    def _drop(self, opened: _Open) -> None:
        """Drop a copy whose tensors changed while they were copied. Training then waits for all later copies."""
        self._alone = True
        self._warn(UNANNOUNCED)
        self.counted.skipped += 1
        if opened.save:
            self._dropped.append(SaveResult(opened.draft.record.step, "", 0.0, "the state changed while it was copied"))

    def collect_results(self) -> bool:
        """Collect the results of earlier saves. Return whether one has failed."""
        results, self._dropped = [*self._dropped, *self._saver.results()], []
        for result in results:
            self._note(result)
        return any(result.why and not result.overtaken for result in results)

    def wait(self, step: int, timeout_s: float) -> bool:
        """Wait for this rank's save of that step. Return whether it succeeded."""
        self.settle(wait=True)
        # If the saver has no request for this step, this process wrote the save itself, or it is already done.
        if step in self._saver.busy.values():
            self._note(self._saver.wait(step, timeout_s))
        return not self.failed

    @property
    def busy(self) -> bool:
        """Return whether a save is running or about to start."""
        return bool(self._saver.busy) or (self._open is not None and self._open.save)

    @property
    def left_to_saver(self) -> bool:
        """Return whether a saver was started. Without an agent, the saver removes the snapshots after its last save."""
        return self._saver.started

    def close(self) -> None:
        self.settle(wait=True)
        self._mover.close()
        self._saver.close()
        if self._slots is not None:
            self._slots.close()
        while self._alive:
            os.close(self._alive.pop())

    def _begin(self, state: TrainingState) -> SnapshotDraft | None:
        """Open a slot and return the draft.

        Return None if no slot is free, or if the state no longer fits into its slots and there is not enough memory for
        larger ones.
        """
        try:
            return self._slots.begin(state, spare=self._saver.busy) if self._slots is not None else None
        except NotEnoughMemory as error:
            self._stop_using_memory(error)
            return None

    def _stop_using_memory(self, error: NotEnoughMemory) -> None:
        self._warn(f"{error}; training now waits for every save")
        if self._slots is not None:
            self._slots.close()
        self._slots = None

    def _prepare(self, state: TrainingState) -> None:
        """Allocate and pin memory before the first snapshot.

        Otherwise the measured cost of that snapshot would be ten times too high.
        """
        if self._slots is None or self._prepared:
            return
        try:
            self._slots.prepare(state)
        except NotEnoughMemory as error:
            self._stop_using_memory(error)
            return
        self._mover.prepare(self._slots.slots, state)
        self._prepared = True
        if self._agent is not None:
            needed = self._ranks_here * compute_needed_bytes(state, SLOTS)
            self._notify(describe_use(needed, SLOTS, self._ranks_here))

    def _note(self, result: SaveResult) -> None:
        for warning in set(result.warnings) - self._warned:
            self._warned.add(warning)
            self._warn(warning)
        if result.overtaken:
            self._note_overtaken(result.step)
            return
        self.failed = bool(result.why)
        if result.why:
            self._warn(
                f"step {result.step} was not saved: {result.why}. Training continues; a later save will be tried"
            )
        else:
            self.counted.saves += 1
            self.counted.save_s = result.seconds

    def _note_overtaken(self, step: int) -> None:
        """Count a dropped save.

        Warn only once, on the first rank, because nothing failed and only the interval is too short.
        """
        self.counted.overtaken += 1
        if self.counted.overtaken == 1 and self._terms.rank == 0:
            self._warn(f"the save of step {step} was dropped for a newer one: a save takes longer than disk_every")
