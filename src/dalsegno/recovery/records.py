"""What the controller remembers of each run it keeps: a small file each, so that its own death loses none of them."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.system.children import Process, owner
from dalsegno.system.files import make_folder, read_json, write_atomic

# A run's id is also the name of its file here: nothing that leads elsewhere, nothing hidden.
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Record:
    """A run that was asked for. `pid` and `start` (ticks) are its coordinator's; 0 while none is known."""

    folder: str
    uid: int
    pid: int = 0
    start: int = 0
    short_lives: int = 0  # of the last ones, in a row
    given_up: bool = False

    @property
    def run(self) -> str:
        return Path(self.folder).name

    @property
    def process(self) -> Process:
        return Process(self.pid, self.start)

    def lives(self) -> bool:
        """Its owner is asked for too: after a reboot of the machine another process could have the same PID and age."""
        return self.process.alive() and owner(self.pid) == self.uid


class Records:
    """The folder of these files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self) -> tuple[dict[str, Record], list[str]]:
        """All of them, and what is wrong with those that cannot be understood."""
        make_folder(self.folder, 0o700)
        found, wrong = {}, []
        for path in sorted(self.folder.glob("*.json")):
            try:
                record = _record(read_json(path))
                found[record.run] = record
            except (DalsegnoError, OSError, TypeError, ValueError) as error:
                wrong.append(f"{path.name} is passed over: {error}")
        return found, wrong

    def write(self, record: Record) -> None:
        write_atomic(self._path(record), json.dumps(asdict(record)), 0o600)

    def remove(self, record: Record) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path(record).unlink()

    def _path(self, record: Record) -> Path:
        return self.folder / f"{record.run}.json"


def _record(value: object) -> Record:
    """Strict about what is there, easy about what is not: a later version may have added to it."""
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    known = {field.name: field.type for field in fields(Record)}
    record = Record(**{name: value[name] for name in known if name in value})
    kinds = {"str": str, "int": int, "bool": bool}
    for name, kind in known.items():
        if type(getattr(record, name)) is not kinds[str(kind)]:
            raise ValueError(f"`{name}` is no {kind}")
    return record
