"""Progress of an import on stderr: a live line in a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time

from dalsegno.cli import out
from dalsegno.cli.out import size

_WIDTH = 24
_EVERY_S = 0.1
_EVERY_PLAIN_S = 5.0


class ImportBar:
    """A progress bar that several threads may update."""

    def __init__(self, quiet: bool = False) -> None:
        self._lock = threading.Lock()
        self._live = sys.stderr.isatty() and not quiet
        self._quiet = quiet
        self._text, self._done, self._total, self._here = "", 0, 0, 0
        self._began = self._shown = time.monotonic()

    def stage(self, text: str, total: int = 0, here: int = 0) -> None:
        with self._lock:
            self._text, self._done, self._total, self._here = text, 0, total, here
            self._began = self._shown = time.monotonic()
            if not self._quiet:
                had = f": {size(here)} of {size(total)} already downloaded" if here else ""
                self._show(plain=f"{text}{had}")

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if self._quiet or now - self._shown < (_EVERY_S if self._live else _EVERY_PLAIN_S):
                return
            self._shown = now
            self._show(plain=f"{self._text}: {self._share():.0%}" if self._total else self._text)

    def warn(self, text: str) -> None:
        with self._lock:
            self._clear()
            out.warn(text)

    def close(self) -> None:
        with self._lock:
            self._clear()

    def _share(self) -> float:
        return min(1.0, max(0.0, self._done / self._total)) if self._total else 0.0

    def _show(self, plain: str) -> None:
        if not self._live:
            out.talk(plain)
            return
        line = self._text
        if self._total:
            full = round(self._share() * _WIDTH)
            rate = max(0, self._done - self._here) / max(time.monotonic() - self._began, 0.1)
            line += f"  {'━' * full}{'─' * (_WIDTH - full)}  {size(self._done)} of {size(self._total)}, {size(rate)}/s"
        out.replace_line(line)

    def _clear(self) -> None:
        if self._live:
            out.replace_line("")
