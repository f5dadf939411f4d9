"""Logs from a node that does not see the run's folder: written here, sent to the coordinator, who writes them there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable

from dalsegno.launch.agent.frames import Message

CHUNK_BYTES = 65536


class LogStream:
    """A folder of our own in place of the run's, and what has been sent of each file in it."""

    def __init__(self, run: str) -> None:
        self.folder = tempfile.mkdtemp(prefix=f"dalsegno.{run}.")
        self._sent: dict[str, int] = {}

    def pump(self, tell: Callable[[Message], None]) -> None:
        """Send what has grown since the last time."""
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = os.path.join(folder, name)
                while data := self._next(path):
                    tell({"log": os.path.relpath(path, self.folder), "text": data.decode("utf-8", "surrogateescape")})

    def _next(self, path: str) -> bytes:
        offset = self._sent.get(path, 0)
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                data = file.read(CHUNK_BYTES)
        except OSError:
            return b""
        self._sent[path] = offset + len(data)
        return data

    def close(self, tell: Callable[[Message], None]) -> None:
        self.pump(tell)
        shutil.rmtree(self.folder, ignore_errors=True)
