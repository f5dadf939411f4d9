"""The slots of a rank in shared memory. At least two are needed: one to keep, and one to write."""

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

from dalsegno.train.errors import NotEnoughMemory
from dalsegno.train.memory.files import SlotName, create_own, open_own, own_folder, safe_name
from dalsegno.train.memory.free_memory import FreeMemory, check_free_memory, read_free_memory
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
from dalsegno.train.memory.safe_steps import read_safe
from dalsegno.train.memory.views import Views
from dalsegno.train.state import TrainingState

# Creation of slot files

_PAGE = 4096
_AT_ONCE = 64 << 20  # bytes allocated per call; limited, because the kernel repeats a call in full after a signal


def create(path: Path, size: int) -> int:
    """Create a file and allocate all its memory now, so that missing memory is an error here and not a SIGBUS later."""
    try:
        fd = create_own(path)
    except PermissionError as error:
        raise NotEnoughMemory(str(error), "have its owner or an administrator remove it") from error
    try:
        _allocate(fd, size)
    except OSError as error:
        os.close(fd)
        path.unlink()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise
        raise NotEnoughMemory(
            f"{path.parent} has no room for {size} bytes", "enlarge /dev/shm, or use fewer slots"
        ) from error
    return fd


def open_existing(path: Path) -> int | None:
    """Open an existing file of this user; None if there is none."""
    return open_own(path, os.O_RDWR)


def map_to_write(fd: int) -> mmap.mmap:
    """Map the file and touch every page now, because page faults would make the copies ten times slower."""
    mapping = mmap.mmap(fd, os.fstat(fd).st_size)
    torch.frombuffer(mapping, dtype=torch.uint8)[::_PAGE].sum()
    return mapping


def map_to_read(fd: int) -> mmap.mmap:
    """Map the file copy-on-write."""
    size = os.fstat(fd).st_size
    return mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _allocate(fd: int, size: int) -> None:
    os.ftruncate(fd, size)
    for at in range(0, size, _AT_ONCE):
        os.posix_fallocate(fd, at, min(_AT_ONCE, size - at))


# A slot, which is one file

_SPARE = 64 << 10


def capacity_for(total: int) -> int:
    """Return the file size for a snapshot. It has a margin, because pickles grow by some bytes between steps."""
    return aligned(total + max(_SPARE, total // 64), _PAGE)


class Slot:
    """The file for one snapshot of one rank, open for writing. It holds a complete step or nothing.

    A slot takes over the file that an earlier process has left.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = open_existing(path)
        self._mapping: mmap.mmap | None = None
        self._views: Views | None = None
        self.on_release: Callable[[], None] | None = None  # called before the slot is unmapped

    @property
    def capacity(self) -> int:
        """Return the size of the file; 0 if there is none yet."""
        return 0 if self._fd is None else os.fstat(self._fd).st_size

    def fits(self, total: int) -> bool:
        """Return whether the file is large enough, and not so large that it wastes memory."""
        return total <= self.capacity <= 2 * capacity_for(total)

    def make_fit(self, total: int) -> None:
        """Prepare the slot for a snapshot of that size.

        A file that does not fit is replaced, and its contents are lost.
        """
        if not self.fits(total):
            self.close()
            self._fd = create(self.path, capacity_for(total))
        if self._mapping is None:
            self._mapping = map_to_write(self._file)
            self._views = Views(torch.frombuffer(self._mapping, dtype=torch.uint8))

    @property
    def buffer(self) -> memoryview:
        """Return the whole file as writable bytes."""
        if self._mapping is None:
            raise RuntimeError(f"{self.path} is not mapped; call make_fit first")
        return memoryview(self._mapping)

    @property
    def views(self) -> Views:
        """Return the views of the file as tensors."""
        if self._views is None:
            raise RuntimeError(f"{self.path} is not mapped; call make_fit first")
        return self._views

    def record(self) -> SnapshotRecord | None:
        """Return the record of the committed snapshot; None if there is none."""
        return None if self._fd is None else parse_record(os.pread(self._fd, HEADER, 0))

    def begin(self) -> bool:
        """Clear the slot, which stays empty until `commit`.

        If a reader holds the slot, change nothing and return False.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        os.pwrite(self._file, NOTHING, 0)
        # Release the lock at once, because later readers see an empty slot. If a writer were killed while it held the
        # lock, processes that it forked would keep the lock.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return True

    def commit(self, record: SnapshotRecord, sums: SnapshotSums | None = None) -> None:
        """Make the snapshot valid with one small write. If `sums` are known, as for a copy, write them first."""
        if sums:
            os.pwrite(self._file, sums.pack(), SUMS_AT)
        os.pwrite(self._file, record.pack(), COMMIT_AT)

    def discard(self) -> None:
        """Remove the file and free its memory."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the slot; the file stays."""
        if self.on_release:
            self.on_release()
        self._mapping = self._views = None  # the file is unmapped when the last tensor that views it is freed
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @property
    def _file(self) -> int:
        if self._fd is None:
            raise RuntimeError(f"{self.path} does not exist; call make_fit first")
        return self._fd


# Snapshots that are being written

Pair = tuple[torch.Tensor, torch.Tensor]  # (target, source)


class SnapshotDraft:
    """A snapshot being written: its slot has everything except the tensors. Copy the pairs, then commit."""

    def __init__(self, slot: Slot, pairs: list[Pair], record: SnapshotRecord) -> None:
        self.slot, self.pairs, self.record = slot, pairs, record

    def commit(self) -> SnapshotRecord:
        """Commit the snapshot. All copies must be complete."""
        self.slot.commit(self.record)
        return self.record


def begin(slot: Slot, state: TrainingState, generation: int, layout: SlotLayout | None = None) -> SnapshotDraft | None:
    """Open the slot for this state and return the draft; None while a reader holds the slot."""
    layout = layout or lay_out(state)
    slot.make_fit(layout.total)
    if not slot.begin():
        return None
    pairs = _put(slot, layout.own, layout.own_at, state) + _put(slot, layout.shared, HEADER, state)
    return SnapshotDraft(slot, pairs, make_record(state, layout, generation))


def write(slot: Slot, state: TrainingState, generation: int, layout: SlotLayout | None = None) -> SnapshotRecord | None:
    """Write a state whose tensors are in host memory and return its record; None while a reader holds the slot."""
    draft = begin(slot, state, generation, layout)
    if draft is None:
        return None
    copy_now(draft.pairs)
    return draft.commit()


def copy_now(pairs: Iterable[Pair]) -> None:
    """Copy the pairs. torch divides each large copy among its threads."""
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


def make_record(state: TrainingState, layout: SlotLayout, generation: int) -> SnapshotRecord:
    shared, own = _extent(layout.shared, HEADER), _extent(layout.own, layout.own_at)
    # `seq` is unique, because the monotonic clock goes back only at a reboot, which also clears the shared memory.
    ids = (state.step, generation, state.rank, state.world)
    return SnapshotRecord(time.monotonic_ns(), *ids, shared, own, is_sharded(state, layout))


def is_sharded(state: TrainingState, layout: SlotLayout) -> bool:
    """Return whether the rank has a shard of the model.

    Statistics of the rank's batches, such as batch norm's, do not count.
    """
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


# Slots of a rank

SLOTS = 2


def compute_needed_bytes(state: TrainingState, slots: int = SLOTS) -> int:
    """Return the memory that one rank's snapshots take in total."""
    return slots * capacity_for(lay_out(state).total)


class Slots:
    """The slots of one rank in one generation. `skipped` counts the snapshots for which no slot was free.

    `ranks` is the number of ranks on this machine, each of which allocates the same amount of shared memory.
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
        read_free_memory: Callable[[Path], FreeMemory] = read_free_memory,
    ) -> None:
        folder = folder or own_folder()
        self.slots = [Slot(folder / str(SlotName(run, rank, number))) for number in range(count)]
        self.skipped = 0
        self._generation, self._resumed, self._ranks = generation, resumed, ranks
        self._folder, self._read_free_memory, self._safe = folder, read_free_memory, folder / safe_name(run)

    def prepare(self, state: TrainingState) -> None:
        """Create missing slots before the first snapshot; raise NotEnoughMemory if they do not fit."""
        self._prepare(lay_out(state))

    def begin(self, state: TrainingState, spare: Collection[str] = ()) -> SnapshotDraft | None:
        """Open a slot for this state and return the draft. `spare` contains the paths of slots that must not be used.

        If no slot may be overwritten yet, count the snapshot as skipped and return None.
        """
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
        """Write a state whose tensors are in host memory and return its record; None if no slot is free."""
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
        """Create or resize the empty slots, and map all slots that fit.

        A slot that contains a step but does not fit is replaced when it is reused.
        """
        unfit = [slot for slot in self.slots if not slot.fits(layout.total)]
        if unfit:
            more = sum(capacity_for(layout.total) - slot.capacity for slot in unfit)
            check_free_memory(
                self._ranks * max(0, more), self._read_free_memory(self._folder), len(self.slots), self._ranks
            )
        empty = [slot for slot in self.slots if slot.record() is None]
        try:
            for slot in self.slots:
                if slot in empty or slot not in unfit:
                    slot.make_fit(layout.total)
        except NotEnoughMemory:
            for slot in empty:
                slot.discard()  # the new slots are useless unless there is memory for all of them
            raise
