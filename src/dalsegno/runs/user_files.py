"""Read the files of users' runs for metrics, as root.

Only regular files of the run's owner are read, up to a size limit. A user may write anything into these files, replace
them during a read, or put links and pipes in their place. A file that cannot be read counts as missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from dalsegno.errors import DalsegnoError
from dalsegno.runs.journal import Entry, parse_entry
from dalsegno.system.ownership import open_owned

MAX_FILE_BYTES = 512 << 10  # a status with 4,000 nodes has 370 kB
MAX_JOURNAL_BYTES = 256 << 10  # limit per read; if a journal is longer when first read, only its end is read

_T = TypeVar("_T")


@dataclass
class WatchedFile(Generic[_T]):
    """A JSON file that is replaced from time to time. It is parsed again only if it has changed."""

    path: Path
    uid: int
    parse: Callable[[Mapping[str, object]], _T]
    _seen: tuple[int, int, int] = (0, 0, 0)
    _value: _T | None = None

    def read(self) -> _T | None:
        """Return the current content; None if there is no such file, or if it cannot be parsed."""
        try:
            with open(open_owned(self.path, self.uid), "rb") as file:
                about = os.fstat(file.fileno())
                seen = (about.st_ino, about.st_mtime_ns, about.st_size)
                if seen == self._seen:
                    return self._value
                self._seen, self._value = seen, None
                if about.st_size <= MAX_FILE_BYTES:
                    self._value = self._parse(file.read(MAX_FILE_BYTES))
        except (OSError, ValueError, RecursionError, OverflowError, TypeError, DalsegnoError):
            self._value = None
        return self._value

    def _parse(self, data: bytes) -> _T | None:
        value = json.loads(data)
        return self.parse(value) if isinstance(value, dict) else None


@dataclass
class JournalTail:
    """A journal that grows. Each read returns the entries added since the previous one."""

    path: Path
    uid: int
    _offset: int | None = None  # None until the journal was read for the first time
    _rest: bytes = field(default=b"", repr=False)

    def read_new(self) -> list[Entry]:
        try:
            with open(open_owned(self.path, self.uid), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if self._offset is None or self._offset > size:
                    self._offset, self._rest = max(0, size - MAX_JOURNAL_BYTES), b""
                file.seek(self._offset)
                data = self._rest + file.read(MAX_JOURNAL_BYTES)
                self._offset = file.tell()
        except OSError:
            return []
        lines = data.split(b"\n")
        self._rest = lines[-1] if len(lines[-1]) <= MAX_JOURNAL_BYTES else b""
        found = (parse_entry(line.decode(errors="replace")) for line in lines[:-1])
        return [entry for entry in found if entry is not None]
