"""Which slot the next snapshot goes into. Pure.

A slot may be overwritten only when what is newer than it is safe: when it is lost in the middle, the run must find a
complete step elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.train.memory.record import Record
from dalsegno.train.memory.safe import Safe


def free_slots(
    slots: Sequence[Record | None], generation: int, resumed: int | None = None, safe: Safe | None = None
) -> list[int]:
    """Slots that may be overwritten, the best first.

    `resumed`: the step this generation started from, if it did not start anew. `safe`: None where nobody replicates.
    """
    kept = _kept_step(slots, generation, resumed, safe)
    empty = [number for number, record in enumerate(slots) if record is None]
    old = [
        (record.generation, record.step, number)
        for number, record in enumerate(slots)
        if record is not None and _is_spent(record, generation, resumed, kept)
    ]
    return empty + [number for _, _, number in sorted(old)]


def _kept_step(slots: Sequence[Record | None], generation: int, resumed: int | None, safe: Safe | None) -> int | None:
    """The newest step of this generation's history that is safe."""
    if safe is None:
        done = [record.step for record in slots if record and record.generation == generation]
    else:
        done = [safe.step] if safe.generation == generation and safe.step >= 0 else []
    return max(done, default=resumed)


def _is_spent(record: Record, generation: int, resumed: int | None, kept: int | None) -> bool:
    if record.generation != generation and (resumed is None or record.step > resumed):
        return True  # steps that were given up when this generation went on from an earlier one
    return kept is not None and record.step < kept
