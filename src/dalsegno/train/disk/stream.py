"""A new file, written once from start to end. While one thread writes, others compute the checksum and have the disk
take what is there already, so that little is left to wait for at the end.
"""

from __future__ import annotations

import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from dalsegno.train.disk.files import write_all
from dalsegno.train.disk.manifest import FileMark

_GATHER = 1 << 20  # bytes: smaller writes are gathered, torch.save makes forty for each tensor
_SLICE = 32 << 20  # bytes that are written and summed side by side
_AHEAD = 128 << 20  # bytes after which the disk is asked to take them


class ChecksummedFile:
    """What torch.save needs of a file, and at the end a mark: size and CRC-32.

    Writing raises nothing: torch.save would answer with an error of its own and hide the disk's. `check` tells.
    """

    def __init__(self, path: Path) -> None:
        # Not for the group to write, whatever the umask: what others can have changed is loaded with less trust.
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._beside = ThreadPoolExecutor(2)
        self._syncing: Future[None] | None = None
        self._unsynced = 0
        self._gathered = bytearray()
        self._crc = 0
        self._error: OSError | None = None
        self.position = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        self.position += view.nbytes
        if view.nbytes < _GATHER:
            self._gathered += view
        if len(self._gathered) >= _GATHER or view.nbytes >= _GATHER:
            self.flush()
        if view.nbytes >= _GATHER:
            for start in range(0, view.nbytes, _SLICE):
                self._put(view[start : start + _SLICE])
        return view.nbytes

    def flush(self) -> None:
        gathered, self._gathered = self._gathered, bytearray()
        self._put(memoryview(gathered))

    def check(self) -> None:
        if self._error:
            raise self._error

    def finish(self) -> FileMark:
        """On the disk, not only on its way there."""
        self.flush()
        self._settle()
        self.check()
        os.fsync(self._fd)
        return FileMark(self.position, self._crc)

    def _put(self, view: memoryview) -> None:
        if self._error:
            return
        summed = self._beside.submit(zlib.crc32, view, self._crc)  # both let go of the interpreter's lock
        try:
            write_all(self._fd, view)
        except OSError as error:
            self._error = error
        self._crc = summed.result()  # nobody may look at the caller's memory after this
        self._sync_ahead(view.nbytes)

    def _sync_ahead(self, written: int) -> None:
        self._unsynced += written
        if self._unsynced >= _AHEAD and (self._syncing is None or self._syncing.done()):
            self._settle()
            self._syncing, self._unsynced = self._beside.submit(os.fsync, self._fd), 0

    def _settle(self) -> None:
        """The system tells of a failed write once, to whoever syncs first: that must not be lost."""
        try:
            if self._syncing:
                self._syncing.result()
        except OSError as error:
            self._error = self._error or error

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._beside.shutdown()
        os.close(self._fd)
