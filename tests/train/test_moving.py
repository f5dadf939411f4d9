"""A copy that failed is heard of by whoever would commit it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.memory.cuda import PendingCopies
from dalsegno.train.snapshots import Beside

UNFIT = [(torch.zeros(2), torch.zeros(3))]


class OnDevice:
    """An event that has come, as a device's stream would tell of it."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


def test_of_a_thread_beside_the_training() -> None:
    with pytest.raises(RuntimeError, match="size"):
        Beside(UNFIT).wait()


def test_of_the_thread_that_empties_pinned_memory() -> None:
    pending = PendingCopies(OnDevice(), [], UNFIT)
    with pytest.raises(RuntimeError, match="size"):
        pending.wait()


def test_what_went_well_says_nothing() -> None:
    target = torch.zeros(3)
    pending = PendingCopies(OnDevice(), [], [(target, torch.ones(3))])
    pending.wait()
    assert pending.done() and target.tolist() == [1.0, 1.0, 1.0]
