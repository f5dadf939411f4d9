"""A slot: one snapshot of one rank in shared memory. It holds a whole step, or nothing.

From the first byte written until the commit it holds nothing: whoever dies in between leaves no mixture.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import torch

from dalsegno.train.memory import segment
from dalsegno.train.memory.layout import aligned
from dalsegno.train.memory.record import COMMIT_AT, HEADER, NOTHING, SUMS_AT, Record, Sums, parse_record
from dalsegno.train.memory.views import Views

_SPARE = 64 << 10
_PAGE = 4096


def capacity_for(total: int) -> int:
    """A little more than is needed: pickles grow by some bytes from step to step, and the file should stay."""
    return aligned(total + max(_SPARE, total // 64), _PAGE)


class Slot:
    """The writer's hand on a slot. Opening it takes over what an earlier process left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = segment.adopt(path)
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
            self._fd = segment.create(self.path, capacity_for(total))
        if self._mapping is None:
            self._mapping = segment.map_to_write(self._file)
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

    def record(self) -> Record | None:
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

    def commit(self, record: Record, sums: Sums | None = None) -> None:
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
