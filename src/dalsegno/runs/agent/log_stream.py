"""Send the logs of a node that cannot access the run folder to the coordinator, which appends them to its files."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable

from dalsegno.wire.frames import Message

CHUNK_BYTES = 65536


def left_folders(run: str, node: str) -> list[str]:
    """Return the folders that killed agents of this run left for this node. Several nodes may share /tmp."""
    pattern = re.compile(re.escape(_prefix(run, node)) + r"\w+")
    there = tempfile.gettempdir()
    found = [os.path.join(there, name) for name in os.listdir(there) if pattern.fullmatch(name)]
    return [path for path in found if os.path.isdir(path) and os.lstat(path).st_uid == os.getuid()]


def _prefix(run: str, node: str) -> str:
    return f"dalsegno.{run}.{node}."


class LogStream:
    """A local folder used in place of the run folder, and the number of bytes sent from each of its files."""

    def __init__(self, run: str, node: str) -> None:
        self.folder = tempfile.mkdtemp(prefix=_prefix(run, node))
        self._sent: dict[str, int] = {}

    def pump(self, send: Callable[[Message], bool]) -> bool:
        """Send a piece of each file that has grown, and return whether anything was sent."""
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(self.folder) for name in names]
        return any([self._send(path, send) for path in paths])

    def _send(self, path: str, send: Callable[[Message], bool]) -> bool:
        data = self._next(path)
        name = os.path.relpath(path, self.folder)
        if not data or not send({"log": name, "text": data.decode("utf-8", "surrogateescape")}):
            return False
        self._sent[path] = self._sent.get(path, 0) + len(data)
        return True

    def _next(self, path: str) -> bytes:
        try:
            with open(path, "rb") as file:
                file.seek(self._sent.get(path, 0))
                return file.read(CHUNK_BYTES)
        except OSError:
            return b""

    def close(self, send: Callable[[Message], bool]) -> None:
        while self.pump(send):
            pass
        shutil.rmtree(self.folder, ignore_errors=True)
