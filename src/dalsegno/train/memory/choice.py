"""Which slot the next snapshot goes into. Pure.

A slot may be overwritten only when what is newer than it is safe: when it is lost in the middle, the run must find a
complete step elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dalsegno.train.memory.record import Record
from dalsegno.train.memory.safe import Place, Safe


def free_slots(
    slots: Sequence[Record | None], generation: int, resumed: int | None = None, safe: Safe | None = None
) -> list[int]:
    """Slots that may be overwritten, the best first.

    `safe`: what the coordinator says of it; None where nobody replicates. Then `resumed` counts, the step this
    generation started from, if it did not start anew.
    """
    empty = [number for number, record in enumerate(slots) if record is None]
    full = [(record.place, number) for number, record in enumerate(slots) if record is not None]
    needs = safe.needs if safe else _needs_alone([place for place, _ in full], generation, resumed)
    return empty + [number for place, number in sorted(full) if not needs(place)]


def _needs_alone(places: Sequence[Place], generation: int, resumed: int | None) -> Callable[[Place], bool]:
    """For whoever has no other node: the newest is kept, and not the steps that an earlier generation gave up."""
    kept = max((step for made_by, step in places if made_by == generation), default=resumed)

    def needs(place: Place) -> bool:
        given_up = place[0] != generation and (resumed is None or place[1] > resumed)
        return not given_up and (kept is None or place[1] >= kept)

    return needs
