"""A rank's slots: two by default, one to keep and one to write."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from dalsegno.train.errors import NoRoom
from dalsegno.train.memory import draft as drafts
from dalsegno.train.memory.choice import free_slots
from dalsegno.train.memory.draft import Draft
from dalsegno.train.memory.layout import Layout, lay_out
from dalsegno.train.memory.names import SlotName, safe_name
from dalsegno.train.memory.owned import own_folder
from dalsegno.train.memory.record import Record
from dalsegno.train.memory.room import Room, check_room, read_room
from dalsegno.train.memory.safe import read_safe
from dalsegno.train.memory.slot import Slot, capacity_for
from dalsegno.train.state import State

SLOTS = 2


def needs_bytes(state: State, slots: int = SLOTS) -> int:
    """Memory that one rank's snapshots take, in all."""
    return slots * capacity_for(lay_out(state).total)


class Slots:
    """Where one rank of one generation puts its snapshots. `skipped` counts those that found no slot free.

    `ranks`: how many ranks of this machine are about to allocate as much.
    """

    def __init__(
        self,
        run: str,
        rank: int,
        generation: int,
        resumed: int | None = None,
        *,
        count: int = SLOTS,
        ranks: int = 1,
        folder: Path | None = None,
        read_room: Callable[[Path], Room] = read_room,
    ) -> None:
        folder = folder or own_folder()
        self.slots = [Slot(folder / str(SlotName(run, rank, number))) for number in range(count)]
        self.skipped = 0
        self._generation, self._resumed, self._ranks = generation, resumed, ranks
        self._folder, self._read_room, self._safe = folder, read_room, folder / safe_name(run)

    def prepare(self, state: State) -> None:
        """Make what is missing before the first step is waiting for it; refuses with `NoRoom`."""
        self._prepare(lay_out(state))

    def begin(self, state: State, spare: Collection[str] = ()) -> Draft | None:
        """Open a slot for this state; None, and counted, if none may be overwritten yet. `spare`: not these paths."""
        layout = lay_out(state)
        self._prepare(layout)
        for number in free_slots(self.records(), self._generation, self._resumed, read_safe(self._safe)):
            slot = self.slots[number]
            draft = drafts.begin(slot, state, self._generation, layout) if str(slot.path) not in spare else None
            if draft is not None:
                return draft
        self.skipped += 1
        return None

    def write(self, state: State) -> Record | None:
        """The whole of it, for tensors in this machine's memory."""
        draft = self.begin(state)
        if draft is None:
            return None
        drafts.copy_now(draft.pairs)
        return draft.commit()

    def records(self) -> list[Record | None]:
        return [slot.record() for slot in self.slots]

    def close(self) -> None:
        for slot in self.slots:
            slot.close()

    def _prepare(self, layout: Layout) -> None:
        """Every slot is mapped, and made to fit if it holds nothing; one that holds a step stays until its turn."""
        unfit = [slot for slot in self.slots if not slot.fits(layout.total)]
        if unfit:
            more = sum(capacity_for(layout.total) - slot.capacity for slot in unfit)
            check_room(self._ranks * max(0, more), self._read_room(self._folder), len(self.slots), self._ranks)
        empty = [slot for slot in self.slots if slot.record() is None]
        try:
            for slot in self.slots:
                if slot in empty or slot not in unfit:
                    slot.make_fit(layout.total)
        except NoRoom:
            for slot in empty:
                slot.discard()  # half of them are of no use to anybody
            raise
