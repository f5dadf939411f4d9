"""Whether a copy may be made beside the training: only while every change of what is copied is announced. Pure.

An optimizer's hook announces its step. It does not where a CUDA graph replays the step, or a script changes parameters
by hand (an average is swapped in). So a copy is begun beside the training only after a step that was announced; one
that a step has passed by without a word, or under which a tensor has changed, is not to be used, nor any like it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tensor(Protocol):
    @property
    def _version(self) -> int:
        """Counts the changes that torch sees."""
        ...


class Trust:
    def __init__(self) -> None:
        self.lost = False
        self._heard = False  # since the last step was done
        self._announced = False  # the last step was
        self._watched: Sequence[tuple[Tensor, int]] = ()

    @property
    def given(self) -> bool:
        return self._announced and not self.lost

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """A copy of these begins."""
        self._watched = [(each, each._version) for each in tensors]

    def hear(self) -> None:
        """An optimizer is about to change them; the copy is waited for."""
        self._heard = True
        self.let_go()

    def let_go(self) -> None:
        """The copy is complete. If one of them has changed by now, it is worth nothing."""
        self.lost = self.lost or any(each._version != version for each, version in self._watched)
        self._watched = ()

    def step_done(self) -> None:
        self.lost = self.lost or (bool(self._watched) and not self._heard)
        self._watched = ()
        self._announced, self._heard = self._heard, False
