"""A part on its way in, from one holder after the other."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from dalsegno.train.errors import CheckpointError
from dalsegno.train.keeper.receiving import make_room
from dalsegno.train.keeper.wire import Channel
from dalsegno.train.memory.record import ABSENT, Record, parse_record
from dalsegno.train.memory.snapshot import Incoming


@dataclass(frozen=True)
class Wanted:
    rank: int
    generation: int
    step: int
    shared: bool  # what all ranks have: then it may come from any

    def is_met_by(self, record: Record | None) -> bool:
        if record is None or (record.generation, record.step) != (self.generation, self.step):
            return False
        return record.own == ABSENT if self.shared else record.shared == ABSENT and record.rank == self.rank

    def asked(self) -> list[object]:
        return [self.rank, self.generation, self.step, "shared" if self.shared else "own"]


class Arriving:
    """Always into a new file: what an earlier one holds may still be read by someone."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self._path, self._wanted = path, wanted
        self._coming: Incoming | None = None
        self._header, self._at = "", 0

    def take_from(self, channel: Channel) -> None:
        """All that is missing, if this holder lives so long. What came stays for the next one."""
        channel.send({"fetch": self._wanted.asked(), "header": self._header, "at": self._at})
        said = channel.answer()
        if said.get("gone"):
            raise CheckpointError("it is not there any more")
        with channel.at_work():
            coming = self._expect(str(said["header"]), int(said["at"]))
        channel.send({"go": True})
        self._at = channel.fill(coming.buffer, self._at)
        if self._at < len(coming.buffer):
            if channel.forged:
                raise CheckpointError("its bytes were changed on their way")
            raise ConnectionError(f"the connection broke after {self._at} of {len(coming.buffer)} bytes")
        self._finish(coming)

    def give_up(self) -> None:
        """Nothing half-made stays behind."""
        if self._coming is not None:
            self._coming.abandon()
            self._coming, self._header, self._at = None, "", 0
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()

    def _expect(self, header: str, at: int) -> Incoming:
        if self._coming is not None and (header, at) == (self._header, self._at):
            return self._coming
        record = parse_record(bytes.fromhex(header))
        if record is None or at != 0 or not self._wanted.is_met_by(record):
            raise CheckpointError("what was sent is not what was asked for")
        self.give_up()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        make_room(self._path, record)
        self._coming, self._header = Incoming(self._path, bytes.fromhex(header)), header
        return self._coming

    def _finish(self, coming: Incoming) -> None:
        if not coming.is_whole():
            self.give_up()
            raise CheckpointError("its checksum does not match")
        coming.commit()
        self._coming = None
