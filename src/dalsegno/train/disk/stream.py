"""A new file, written once from start to end. Its checksum is computed while the system writes, on another core."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from dalsegno.train.disk.files import write_all
from dalsegno.train.disk.manifest import FileMark

_GATHER = 1 << 20  # bytes: smaller writes are gathered, torch.save makes forty for each tensor


class ChecksummedFile:
    """What torch.save needs of a file, and at the end a mark: size and CRC-32.

    Writing raises nothing: torch.save would answer with an error of its own and hide the disk's. `check` tells.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._beside = ThreadPoolExecutor(1)
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
            self._put(view)
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

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._beside.shutdown()
        os.close(self._fd)
