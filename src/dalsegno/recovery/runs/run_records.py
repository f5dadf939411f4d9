"""Records of the runs that the controller keeps alive: one small file each, so that a controller crash loses none."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.system.children import Process, owner
from dalsegno.system.files import make_folder, read_json, write_atomic

ENDED = "ended"  # sibling folder with the records of ended runs
MAX_ENDED, MAX_ENDED_OF_A_USER = 500, 100  # maximum numbers of ended runs that are kept; the oldest are removed
# A run's id is also the name of its file: it must not contain a path separator or start with a dot.
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class RunRecord:
    """A run that was requested. `pid` and `start` (ticks) identify its coordinator; 0 while none is known."""

    folder: str
    uid: int
    pid: int = 0
    start: int = 0
    short_lives: int = 0  # number of coordinators in a row that ended early
    given_up: bool = False

    @property
    def run(self) -> str:
        return Path(self.folder).name

    @property
    def process(self) -> Process:
        return Process(self.pid, self.start)

    def lives(self) -> bool:
        """Return whether the coordinator runs.

        Its owner is compared too: after a reboot, another process can have the same PID and start time.
        """
        return self.process.alive() and owner(self.pid) == self.uid


class RunRecords:
    """The folder of the record files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self) -> tuple[dict[str, RunRecord], list[str]]:
        """Return all records, and an error text for each file that cannot be parsed."""
        make_folder(self.folder, 0o700)
        found, wrong = {}, []
        for path in sorted(self.folder.glob("*.json")):
            try:
                record = _record(read_json(path))
                found[record.run] = record
            except (DalsegnoError, OSError, TypeError, ValueError) as error:
                wrong.append(f"{path.name} ignored: {error}")
        return found, wrong

    def write(self, record: RunRecord) -> None:
        write_atomic(self._path(record), json.dumps(asdict(record)), 0o600)

    def remove(self, record: RunRecord) -> None:
        """Move the record to the folder of ended runs."""
        ended = self.folder.with_name(ENDED)
        with contextlib.suppress(DalsegnoError, OSError):  # losing the history is not an error
            make_folder(ended, 0o700)
            os.utime(self._path(record))
            os.replace(self._path(record), ended / self._path(record).name)
            for old in _surplus(ended):
                old.unlink()
        with contextlib.suppress(FileNotFoundError):
            self._path(record).unlink()

    def read_ended(self, run: str) -> RunRecord | None:
        """Return the record of a run that is over; None if there is none."""
        try:
            return _record(read_json(self.folder.with_name(ENDED) / f"{run}.json"))
        except (DalsegnoError, OSError, TypeError, ValueError):
            return None

    def _path(self, record: RunRecord) -> Path:
        return self.folder / f"{record.run}.json"


def _surplus(ended: Path) -> list[Path]:
    """Return the records to remove: the oldest ones over the limit of each user, then the oldest ones over the limit of
    all users."""
    newest_first = sorted(ended.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    records, _ = RunRecords(ended).read()
    kept, surplus, of_user = list[Path](), list[Path](), Counter[int | None]()
    for path in newest_first:
        uid = records[path.stem].uid if path.stem in records else None
        of_user[uid] += 1
        (kept if of_user[uid] <= MAX_ENDED_OF_A_USER else surplus).append(path)
    return surplus + kept[MAX_ENDED:]


def _record(value: object) -> RunRecord:
    """Parse a record. Types are checked; unknown fields are ignored, and optional ones may be missing."""
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    known = {field.name: field.type for field in fields(RunRecord)}
    record = RunRecord(**{name: value[name] for name in known if name in value})
    kinds = {"str": str, "int": int, "bool": bool}
    for name, kind in known.items():
        if type(getattr(record, name)) is not kinds[str(kind)]:
            raise ValueError(f"`{name}` is not of type {kind}")
    return record
