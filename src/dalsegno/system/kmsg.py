"""The kernel's log, record by record, from where the last look ended."""

from __future__ import annotations

import os

RECORD_BYTES = 8192  # the kernel refuses a smaller room than its record
MOST = 20_000  # of one look: more than the kernel's buffer holds


class KernelLog:
    """/dev/kmsg held open: each look costs only what is new. Its first look is the whole buffer."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._path = path
        self._fd: int | None = None

    def new_records(self) -> list[str]:
        """Lines of the form `level,sequence,microseconds,flags;text`. OSError where the log may not be read."""
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found: list[str] = []
        while len(found) < MOST:
            try:
                record = os.read(self._fd, RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:  # what was next has been overwritten: go on with the oldest there is
                continue
            if not record:
                break
            found.append(record.decode(errors="replace").split("\n", 1)[0])  # then come key=value lines
        return found

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
