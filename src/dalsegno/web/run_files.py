"""The files of runs, read by root or by the cluster's owner.

They belong to users, who can replace them, link them elsewhere or make them huge. Each is opened from its folder's
descriptor without following links, and only a regular file of the run's owner is read, up to a limit.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.recovery.run_records import RunRecord
from dalsegno.runs.coordinator.goodput import TrainingProgress
from dalsegno.runs.coordinator.history import StepPoint, parse_history
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.journal import Entry
from dalsegno.runs.status import RunStatus, status_from_json
from dalsegno.spec.facts import facts_from_json
from dalsegno.web.snapshot import RunPicture

MAX_STATUS_BYTES = 256 << 10
MAX_PROGRESS_BYTES = 64 << 10
MAX_HISTORY_BYTES = 1 << 20
MAX_JOURNAL_BYTES = 2 << 20  # the end of a longer one is read
MAX_ENTRIES = 5000


def read_owned(folder: str, name: str, uid: int, most: int, *, end: bool = False) -> bytes | None:
    """Return the first bytes, or with `end` the last ones, of a user's file; None if it must not or cannot be read."""
    try:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        if os.fstat(at).st_uid != uid:
            return None
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    except OSError:
        return None
    finally:
        os.close(at)
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode) or about.st_uid != uid:
        os.close(handle)
        return None
    with open(handle, "rb") as file, contextlib.suppress(OSError):
        if end and about.st_size > most:
            file.seek(about.st_size - most)
        return file.read(most)
    return None


def _value(record: RunRecord, path: Path, most: int) -> Mapping[str, object] | None:
    text = read_owned(record.folder, path.name, record.uid, most)
    try:
        value = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_run(record: RunRecord, *, kept: bool) -> RunPicture | None:
    """Return a run as its files describe it; None if its status cannot be read."""
    folder = RunFolder(Path(record.folder))
    status = _status(_value(record, folder.status, MAX_STATUS_BYTES))
    if status is None or status.run != record.run:
        return None
    progress = _progress(_value(record, folder.progress, MAX_PROGRESS_BYTES))
    return RunPicture(record.folder, record.uid, status, progress, kept)


def _status(value: Mapping[str, object] | None) -> RunStatus | None:
    with contextlib.suppress(DalsegnoError, TypeError, ValueError):
        status = status_from_json(value) if value else None
        times = (status.created, status.updated, status.started or 0.0, status.ended or 0.0) if status else ()
        return status if all(map(math.isfinite, times)) else None
    return None


def _progress(value: Mapping[str, object] | None) -> TrainingProgress | None:
    with contextlib.suppress(DalsegnoError, TypeError, ValueError):
        return facts_from_json(TrainingProgress, value) if value else None
    return None


def read_points(record: RunRecord) -> tuple[StepPoint, ...]:
    """Return the history of a run's loss and step time."""
    return parse_history(_value(record, RunFolder(Path(record.folder)).history, MAX_HISTORY_BYTES))


def read_entries(record: RunRecord) -> list[Entry]:
    """Return the last entries of a run's journal."""
    name = RunFolder(Path(record.folder)).journal.name
    text = read_owned(record.folder, name, record.uid, MAX_JOURNAL_BYTES, end=True) or b""
    return list(_entries(text.decode(errors="replace").splitlines()[-MAX_ENTRIES:]))


def _entries(lines: list[str]) -> Iterator[Entry]:
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        at = entry.get("at") if isinstance(entry, dict) else None
        if isinstance(at, (int, float)) and math.isfinite(at):
            yield entry
