"""Copies a snapshot's tensors into its slot: at once, or from a GPU beside the training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch.optim.optimizer import register_optimizer_step_pre_hook

from dalsegno.train.memory.cuda import Copier
from dalsegno.train.memory.draft import Draft, copy_now
from dalsegno.train.memory.slot import Slot
from dalsegno.train.state import State


class Moving(Protocol):
    def done(self) -> bool: ...

    def wait(self) -> None: ...


class Moved:
    """Nothing to wait for."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class Mover:
    """The device is that of the first tensor that is on one."""

    def __init__(self) -> None:
        self._copier: Copier | None = None

    def prepare(self, slots: Sequence[Slot], state: State) -> None:
        """Pinning takes a while: all slots at once, before the first snapshot."""
        device = next((piece.tensor.device for piece in state.pieces if piece.tensor.is_cuda), None)
        if device is not None:
            self._copier = Copier(device)
            register_optimizer_step_pre_hook(self._before_step)
            for slot in slots:
                self._copier.pin(slot)

    def move(self, draft: Draft) -> Moving:
        if self._copier is None:
            copy_now(draft.pairs)
            return Moved()
        return self._copier.start(draft)

    def _before_step(self, *ignored: object) -> None:
        """An optimizer is about to change what is being copied."""
        if self._copier is not None:
            self._copier.before_change()
