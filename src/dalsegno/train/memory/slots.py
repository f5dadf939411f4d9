"""A rank's slots: two by default, one to keep and one to write."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
import zlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import torch

from dalsegno.train.errors import NoRoom
from dalsegno.train.memory.files import SlotName, create_own, open_own, own_folder, safe_name
from dalsegno.train.memory.layout import LaidOutPart, SlotLayout, aligned, lay_out
from dalsegno.train.memory.record import (
    COMMIT_AT,
    HEADER,
    NOTHING,
    SUMS_AT,
    Extent,
    SnapshotRecord,
    SnapshotSums,
    free_slots,
    parse_record,
)
from dalsegno.train.memory.room import FreeMemory, check_room, read_room
from dalsegno.train.memory.safe import read_safe
from dalsegno.train.memory.views import Views
from dalsegno.train.state import TrainingState

# ---- Files in shared memory: made, mapped, and touched once.


_PAGE = 4096
_AT_ONCE = 64 << 20  # a signal makes the kernel undo and begin anew what one call has allocated


def create(path: Path, size: int) -> int:
    """A new file of that size with all its memory: what is missing is an error now, not a SIGBUS later."""
    try:
        fd = create_own(path)
    except PermissionError as error:
        raise NoRoom(str(error), "find out who created it, and have it removed") from error
    try:
        _allocate(fd, size)
    except OSError as error:
        os.close(fd)
        path.unlink()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise
        raise NoRoom(f"{path.parent} is full: no room for {size} bytes", "a larger /dev/shm, or fewer slots") from error
    return fd


def adopt(path: Path) -> int | None:
    """The file as it is; None if there is none of ours."""
    return open_own(path, os.O_RDWR)


def map_to_write(fd: int) -> mmap.mmap:
    """All bytes of the file. Every page is touched here, so that no copy has to wait for page faults (10 x slower)."""
    mapping = mmap.mmap(fd, os.fstat(fd).st_size)
    torch.frombuffer(mapping, dtype=torch.uint8)[::_PAGE].sum()
    return mapping


def map_to_read(fd: int) -> mmap.mmap:
    """All bytes of the file; whoever changes them changes a copy of their own."""
    size = os.fstat(fd).st_size
    return mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _allocate(fd: int, size: int) -> None:
    os.ftruncate(fd, size)
    for at in range(0, size, _AT_ONCE):
        os.posix_fallocate(fd, at, min(_AT_ONCE, size - at))


# ---- A slot: one snapshot of one rank in shared memory. It holds a whole step, or nothing.


_SPARE = 64 << 10


def capacity_for(total: int) -> int:
    """A little more than is needed: pickles grow by some bytes from step to step, and the file should stay."""
    return aligned(total + max(_SPARE, total // 64), _PAGE)


class Slot:
    """The writer's hand on a slot. Opening it takes over what an earlier process left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = adopt(path)
        self._mapping: mmap.mmap | None = None
        self._views: Views | None = None
        self.on_release: Callable[[], None] | None = None  # told before the mapping goes

    @property
    def capacity(self) -> int:
        """Bytes of the file; 0 if there is none yet."""
        return 0 if self._fd is None else os.fstat(self._fd).st_size

    def fits(self, total: int) -> bool:
        """Big enough, and not so big that memory lies waste."""
        return total <= self.capacity <= 2 * capacity_for(total)

    def make_fit(self, total: int) -> None:
        """Ready for a snapshot of that size. A file that does not fit goes, with what it held."""
        if not self.fits(total):
            self.close()
            self._fd = create(self.path, capacity_for(total))
        if self._mapping is None:
            self._mapping = map_to_write(self._file)
            self._views = Views(torch.frombuffer(self._mapping, dtype=torch.uint8))

    @property
    def buffer(self) -> memoryview:
        """The whole file, for whoever fills it from a connection."""
        if self._mapping is None:
            raise RuntimeError(f"{self.path} is not mapped; call make_fit first")
        return memoryview(self._mapping)

    @property
    def views(self) -> Views:
        """The same, for tensors."""
        if self._views is None:
            raise RuntimeError(f"{self.path} is not mapped; call make_fit first")
        return self._views

    def record(self) -> SnapshotRecord | None:
        """What it holds."""
        return None if self._fd is None else parse_record(os.pread(self._fd, HEADER, 0))

    def begin(self) -> bool:
        """From here it holds nothing, until `commit`. False, and untouched, while someone reads it and holds it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        os.pwrite(self._file, NOTHING, 0)
        # Let go at once: who holds it from here on sees that it holds nothing. A lock kept while writing would outlive
        # a killed writer in the processes it forked.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return True

    def commit(self, record: SnapshotRecord, sums: SnapshotSums | None = None) -> None:
        """One small write makes it valid. Checksums that are known already, for a copy, go before it."""
        if sums:
            os.pwrite(self._file, sums.pack(), SUMS_AT)
        os.pwrite(self._file, record.pack(), COMMIT_AT)

    def discard(self) -> None:
        """Give its memory back, and what it held."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of it; the file stays."""
        if self.on_release:
            self.on_release()
        self._mapping = self._views = None  # it goes with the last tensor that looks into it
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @property
    def _file(self) -> int:
        if self._fd is None:
            raise RuntimeError(f"{self.path} is not there; call make_fit first")
        return self._fd


# ---- A snapshot on its way into a slot.


Pair = tuple[torch.Tensor, torch.Tensor]  # where to, where from


class Draft:
    """The slot is open: all but the tensors is in it. Copy the pairs, by whatever means, then commit."""

    def __init__(self, slot: Slot, pairs: list[Pair], record: SnapshotRecord) -> None:
        self.slot, self.pairs, self.record = slot, pairs, record

    def commit(self) -> SnapshotRecord:
        """Only now does the slot hold the snapshot. All copies must be complete."""
        self.slot.commit(self.record)
        return self.record


def begin(slot: Slot, state: TrainingState, generation: int, layout: SlotLayout | None = None) -> Draft | None:
    """Open the slot for this state; None while someone still reads what is in it."""
    layout = layout or lay_out(state)
    slot.make_fit(layout.total)
    if not slot.begin():
        return None
    pairs = _put(slot, layout.own, layout.own_at, state) + _put(slot, layout.shared, HEADER, state)
    return Draft(slot, pairs, record_of(state, layout, generation))


def write(slot: Slot, state: TrainingState, generation: int, layout: SlotLayout | None = None) -> SnapshotRecord | None:
    """The whole of it, for tensors in this machine's memory."""
    draft = begin(slot, state, generation, layout)
    if draft is None:
        return None
    copy_now(draft.pairs)
    return draft.commit()


def copy_now(pairs: Iterable[Pair]) -> None:
    """torch divides each large copy among its threads."""
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


def record_of(state: TrainingState, layout: SlotLayout, generation: int) -> SnapshotRecord:
    shared, own = _extent(layout.shared, HEADER), _extent(layout.own, layout.own_at)
    # The machine's own clock never goes back while its memory lives: no two snapshots bear one number.
    about = (state.step, generation, state.rank, state.world)
    return SnapshotRecord(time.monotonic_ns(), *about, shared, own, is_sharded(state, layout))


def is_sharded(state: TrainingState, layout: SlotLayout) -> bool:
    """Whether the rank has a part of the model to itself. Statistics of its own batches are none; alone it has all."""
    return any(piece.shape != piece.size or state.world == 1 for piece in layout.own.pieces)


def _extent(part: LaidOutPart, at: int) -> Extent:
    return Extent(at, part.length, len(part.head), zlib.crc32(part.head))


def _put(slot: Slot, part: LaidOutPart, at: int, state: TrainingState) -> list[Pair]:
    body_at, buffer = at + part.body_at, slot.buffer
    buffer[at : at + len(part.head)] = part.head
    for blob, content in part.blobs:
        buffer[body_at + blob.at : body_at + blob.at + blob.length] = content
    sources = [state.pieces[piece.order].tensor for piece in part.pieces]
    return list(zip(slot.views.of(part.pieces, body_at), sources))


# ---- A rank's slots: two by default, one to keep and one to write.


SLOTS = 2


def needs_bytes(state: TrainingState, slots: int = SLOTS) -> int:
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
        read_room: Callable[[Path], FreeMemory] = read_room,
    ) -> None:
        folder = folder or own_folder()
        self.slots = [Slot(folder / str(SlotName(run, rank, number))) for number in range(count)]
        self.skipped = 0
        self._generation, self._resumed, self._ranks = generation, resumed, ranks
        self._folder, self._read_room, self._safe = folder, read_room, folder / safe_name(run)

    def prepare(self, state: TrainingState) -> None:
        """Make what is missing before the first step is waiting for it; refuses with `NoRoom`."""
        self._prepare(lay_out(state))

    def begin(self, state: TrainingState, spare: Collection[str] = ()) -> Draft | None:
        """Open a slot for this state; None, and counted, if none may be overwritten yet. `spare`: not these paths."""
        layout = lay_out(state)
        self._prepare(layout)
        for number in free_slots(self.records(), self._generation, self._resumed, read_safe(self._safe)):
            slot = self.slots[number]
            draft = begin(slot, state, self._generation, layout) if str(slot.path) not in spare else None
            if draft is not None:
                return draft
        self.skipped += 1
        return None

    def write(self, state: TrainingState) -> SnapshotRecord | None:
        """The whole of it, for tensors in this machine's memory."""
        draft = self.begin(state)
        if draft is None:
            return None
        copy_now(draft.pairs)
        return draft.commit()

    def records(self) -> list[SnapshotRecord | None]:
        return [slot.record() for slot in self.slots]

    def close(self) -> None:
        for slot in self.slots:
            slot.close()

    def _prepare(self, layout: SlotLayout) -> None:
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
