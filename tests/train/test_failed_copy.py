"""A failed copy raises in `wait`, before it can be committed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.memory.cuda import PendingCopies
from dalsegno.train.snapshots import ThreadCopy

UNFIT = [(torch.zeros(2), torch.zeros(3))]


class OnDevice:
    """A fake of a CUDA event that has completed."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


def test_error_of_the_copy_thread_is_raised_in_wait() -> None:
    with pytest.raises(RuntimeError, match="size"):
        ThreadCopy(UNFIT).wait()


def test_error_of_the_pinned_memory_thread_is_raised_in_wait() -> None:
    pending = PendingCopies(OnDevice(), [], UNFIT)
    with pytest.raises(RuntimeError, match="size"):
        pending.wait()


def test_successful_copy_raises_nothing() -> None:
    target = torch.zeros(3)
    pending = PendingCopies(OnDevice(), [], [(target, torch.ones(3))])
    pending.wait()
    assert pending.done() and target.tolist() == [1.0, 1.0, 1.0]
