"""Send the logs of a node that cannot access the run folder to the coordinator, which writes them to that folder."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable

from dalsegno.wire.frames import Message

CHUNK_BYTES = 65536


def left_folders(run: str, node: str) -> list[str]:
    """Return the folders that killed agents of this run left on this node.

    Folders of other nodes that share /tmp are excluded.
    """
    pattern = re.compile(re.escape(_prefix(run, node)) + r"\w+")
    there = tempfile.gettempdir()
    found = [os.path.join(there, name) for name in os.listdir(there) if pattern.fullmatch(name)]
    return [path for path in found if os.path.isdir(path) and os.lstat(path).st_uid == os.getuid()]


def _prefix(run: str, node: str) -> str:
    return f"dalsegno.{run}.{node}."


class LogStream:
    """A local folder used in place of the run folder, and how much of each of its files was sent and received."""

    def __init__(self, run: str, node: str) -> None:
        self.folder = tempfile.mkdtemp(prefix=_prefix(run, node))
        self._sent: dict[str, int] = {}  # path -> number of bytes sent
        self._received: dict[str, int] = {}  # path -> number of bytes that the coordinator has confirmed

    def confirm(self, name: str, end: int) -> None:
        """Record that the coordinator has received a file up to this offset."""
        path = os.path.join(self.folder, name)
        self._received[path] = max(end, self._received.get(path, 0))

    def rewind(self) -> None:
        """Make `pump` repeat unconfirmed data, because such data may have been lost with the old connection."""
        self._sent = dict(self._received)

    def pump(self, send: Callable[[Message], bool]) -> bool:
        """Send a piece of each file that has grown, and return whether anything was sent."""
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(self.folder) for name in names]
        return any([self._send(path, send) for path in paths])

    def _send(self, path: str, send: Callable[[Message], bool]) -> bool:
        at, data = self._sent.get(path, 0), self._next(path)
        name = os.path.relpath(path, self.folder)
        text = data.decode("utf-8", "surrogateescape")
        if not data or not send({"log": name, "text": text, "at": at, "stream": os.path.basename(self.folder)}):
            return False
        self._sent[path] = at + len(data)
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
