"""A store of torch's for two ranks, on a connection that they have already. Loads torch."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import torch.distributed as dist

from dalsegno.train.frames import BadFrame, Reader, send


class ChannelStore(dist.Store):  # type: ignore[misc]
    """A store for two, on a connection: what one sets, the other is told."""

    def __init__(self, channel: socket.socket) -> None:
        super().__init__()
        self._channel, self._known = channel, dict[str, bytes]()
        self._news, self._open = threading.Condition(), True
        threading.Thread(target=self._listen, daemon=True).start()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._news:
            self._known[key] = data
            self._news.notify_all()
            send(self._channel, {"key": key, "value": data.hex()})

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """The one who waits is killed when his time is up: only the other side's end is looked for."""
        with self._news:
            most_s = None if timeout is None else timeout.total_seconds()
            self._news.wait_for(lambda: self.check(keys) or not self._open, most_s)
            if not self.check(keys):
                raise OSError("the other node did not answer" if self._open else "the other node has left")

    def check(self, keys: list[str]) -> bool:
        return all(key in self._known for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Counts of this side's own."""
        with self._news:
            total = int(self._known.get(key, b"0")) + amount
            self._known[key] = b"%d" % total
            return total

    def _listen(self) -> None:
        reader = Reader()
        try:
            while data := self._channel.recv(65536):
                for message in reader.feed(data):
                    self._learn(str(message["key"]), bytes.fromhex(message["value"]))
        except (OSError, BadFrame, KeyError, TypeError, ValueError):
            pass  # it speaks no language of ours, or is gone
        with self._news:
            self._open = False
            self._news.notify_all()

    def _learn(self, key: str, value: bytes) -> None:
        with self._news:
            self._known[key] = value
            self._news.notify_all()
