"""Records of lasting faults. Each record is a small file in the folder of its node, written before the fault begins.

A remedy removes the records of the faults that it ends.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dalsegno.errors import DalsegnoError
from dalsegno.health.result import Remedy
from dalsegno.system.children import Process
from dalsegno.system.files import in_turn, make_folder, read_json, write_atomic

BAD_REPLACEMENT = "bad-replacement"


def lock_path(folder: Path) -> Path:
    return folder / "lock"


def changing(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that holds the lock on a node's faults.

    Without the lock, the timer of one fault could undo a newer fault with the same name.
    """
    return in_turn(lock_path(folder))


@dataclass(frozen=True)
class FaultRecord:
    """A lasting fault. `mark` distinguishes it from a later fault with the same name. `undo` identifies the process
    that the fault affects, if any."""

    fault: str
    node: str
    at: float
    mark: str
    options: Mapping[str, Any] = field(default_factory=dict)
    undo: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ended_by(self) -> Remedy:
        """The lightest remedy that ends the fault."""
        former = self.options.get("mended_by", Remedy.REBOOT.value)  # the key in records of earlier releases
        return Remedy(self.options.get("repaired_by", former))


def record(
    folder: Path, fault: str, node: str, options: Mapping[str, Any], undo: Mapping[str, Any] | None = None
) -> FaultRecord:
    """Record a fault that is about to begin. The record replaces that of an earlier fault with the same name."""
    made = FaultRecord(fault, node, time.time(), secrets.token_hex(8), options, undo or {})
    make_folder(folder)
    write_atomic(record_path(folder, fault), json.dumps(asdict(made)))
    return made


def forget(folder: Path, one: FaultRecord) -> None:
    """Remove a record, unless it was already removed or a newer record has replaced it."""
    if is_current(folder, one):
        with contextlib.suppress(FileNotFoundError):
            record_path(folder, one.fault).unlink()


def is_current(folder: Path, one: FaultRecord) -> bool:
    now = _read(record_path(folder, one.fault))
    return now is not None and now.mark == one.mark


def read_records(folder: Path) -> list[FaultRecord]:
    """Return the faults that still last, oldest first. A file that cannot be parsed is skipped."""
    found = (_read(path) for path in folder.glob("*.json"))
    return sorted((one for one in found if one is not None and not _is_over(one)), key=lambda one: one.at)


def _is_over(one: FaultRecord) -> bool:
    """Return whether the fault has ended by itself: it stopped a worker, and that worker has ended."""
    if one.fault != "worker-hang" or "pid" not in one.undo:
        return False
    return not Process(int(one.undo["pid"]), int(one.undo["start"])).alive()


def record_path(folder: Path, fault: str) -> Path:
    return folder / f"{fault}.json"


def _read(path: Path) -> FaultRecord | None:
    with contextlib.suppress(DalsegnoError, OSError, TypeError):
        value = read_json(path)
        return FaultRecord(**value) if isinstance(value, dict) else None  # type: ignore[arg-type]
    return None


def end_by_remedy(folder: Path, remedy: Remedy) -> None:
    """Remove the records of the faults that this remedy ends. If the remedy replaces a node that has the fault
    `bad-replacement`, apply that fault to the new machine."""
    with changing(folder):
        for fault in read_records(folder):
            if fault.fault != BAD_REPLACEMENT and not remedy < fault.ended_by:
                forget(folder, fault)
        bad = _bad_replacement(folder)
        if bad is not None and remedy is Remedy.REPLACE:
            _spoil(folder, bad)


def brings_old_gpus(folder: Path) -> bool:
    """Return whether an injected fault makes the next replacement have the same GPUs as the old machine."""
    bad = _bad_replacement(folder)
    return bool(bad and bad.options.get("same"))


def _bad_replacement(folder: Path) -> FaultRecord | None:
    return next((fault for fault in read_records(folder) if fault.fault == BAD_REPLACEMENT), None)


def _spoil(folder: Path, bad: FaultRecord) -> None:
    left = int(bad.options.get("count", 1)) - 1
    if not bad.options.get("same"):
        record(folder, "ecc", bad.node, {"count": 7, "repaired_by": Remedy.REPLACE.value})
    if left:
        record(folder, BAD_REPLACEMENT, bad.node, {**bad.options, "count": left})
    else:
        forget(folder, bad)
