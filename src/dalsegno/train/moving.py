"""Copies a snapshot's tensors into its slot, beside the training where that is possible.

From one step to the next nothing changes parameters and their optimizer's states until the optimizer's own next step:
so long their copy may take. All else (a batch norm's statistics change in the forward pass) is copied at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Sequence
from typing import Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dalsegno.train.memory.cuda import Copier
from dalsegno.train.memory.draft import Draft, Pair, copy_now
from dalsegno.train.memory.slot import Slot
from dalsegno.train.state import State
from dalsegno.train.trust import Trust

SMALL = 16 << 20  # bytes: copied before a thread would have begun


class Moving(Protocol):
    def done(self) -> bool: ...

    def wait(self) -> None: ...


class Moved:
    """Nothing to wait for."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class Beside:
    """In a thread: torch's copies let other threads run."""

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
        except BaseException as error:  # told to whoever waits
            self._error = error


class Mover:
    """One for a process: every optimizer's step waits for the copy under way."""

    def __init__(self) -> None:
        self._copier: Copier | None = None
        self._beside: Beside | None = None
        self._waited_s = 0.0
        self.trust = Trust()
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def prepare(self, slots: Sequence[Slot], state: State) -> None:
        """Pinning takes a while: all slots at once, before the first snapshot."""
        device = next((piece.tensor.device for piece in state.pieces if piece.tensor.is_cuda), None)
        if device is not None:
            self._copier = Copier(device)
            for slot in slots:
                self._copier.pin(slot)

    def move(self, draft: Draft, steady: Container[int]) -> Moving:
        """`steady`: the addresses of tensors that only an optimizer's step changes."""
        later = [pair for pair in draft.pairs if pair[1].data_ptr() in steady and not pair[1].is_inference()]
        if not self.trust.given or sum(source.nbytes for _, source in later) < SMALL:
            later = []
        self.trust.watch([source for _, source in later])
        if self._copier is not None:
            return self._copier.start(draft, {source.data_ptr() for _, source in later})
        if not later:
            copy_now(draft.pairs)
            return Moved()
        steady = {source.data_ptr() for _, source in later}
        copy_now(pair for pair in draft.pairs if pair[1].data_ptr() not in steady)
        self._beside = Beside(later)
        return self._beside

    def waited_s(self) -> float:
        """How long optimizers have waited for copies since this was last asked."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def close(self) -> None:
        self._hook.remove()

    def _before_step(self, *ignored: object) -> None:
        """An optimizer is about to change what is being copied."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return  # a graph is being recorded: nothing changes yet, and nothing may be waited for
        began = time.monotonic()
        if self._copier is not None:
            self._copier.before_change()
        if self._beside is not None:
            self._beside.wait()
            self._beside = None
        self._waited_s += time.monotonic() - began
        self.trust.hear()
