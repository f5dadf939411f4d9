"""Following files while they grow: their lines, each behind its worker's name, go to our own output too."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

INTERVAL_S = 0.05
_CHUNK = 1 << 20
Write = Callable[[int, bytes], None]  # which output (1 or 2), and what


@dataclass
class Tail:
    """One file's: whose lines these are, and where they go; those with one of the `words` to the file `kept` too."""

    prefix: bytes
    stream: int
    kept: str = ""
    words: tuple[bytes, ...] = ()
    offset: int = 0
    rest: bytes = b""  # of a line that is not whole yet

    def take(self, data: bytes, last: bool) -> list[bytes]:
        """Whole lines, with their prefix; at the very end what is left counts as one."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if last and self.rest:
            lines, self.rest = [*lines, self.rest], b""
        return [self.prefix + line + b"\n" for line in lines]


class Tee:
    """A thread of its own, from the first file on: a reader that is slow holds up no worker and no agent."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._tails: dict[str, Tail] = {}
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, path: str, tail: Tail) -> None:
        """From its beginning; a file that is followed already goes on from where it is."""
        self._tails.setdefault(path, tail)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tee", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """When nobody writes any more: the rest is shown, then it ends."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(INTERVAL_S):
            self._look(last=False)
        self._look(last=True)

    def _look(self, last: bool) -> None:
        for path, tail in list(self._tails.items()):
            for data in _new_data(path, tail):
                self._show(tail, tail.take(data, last=False))
            if last:
                self._show(tail, tail.take(b"", last=True))

    def _show(self, tail: Tail, lines: list[bytes]) -> None:
        if lines:
            self._write(tail.stream, b"".join(lines))
        chosen = [line for line in lines if any(word in line for word in tail.words)]
        if chosen and tail.kept:
            with contextlib.suppress(OSError), open(tail.kept, "ab") as file:
                file.writelines(chosen)


def _new_data(path: str, tail: Tail) -> Iterator[bytes]:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(tail.offset)
        while data := file.read(_CHUNK):
            tail.offset += len(data)
            yield data


def write_all(stream: int, data: bytes) -> None:
    """To one of our own outputs; one that nobody reads any more takes nothing."""
    with contextlib.suppress(OSError):
        view = memoryview(data)
        while view:
            view = view[os.write(stream, view) :]
