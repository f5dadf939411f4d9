"""Read the files of runs, usually as root or as the cluster's owner.

The files belong to users, who can replace them, link them elsewhere or make them huge. Each file is opened relative to
its folder's descriptor, without following links. Only a regular file of the run's owner is read, up to a limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.recovery.runs.run_records import RunRecord
from dalsegno.runs.coordinator.reports.goodput import TrainingProgress
from dalsegno.runs.coordinator.reports.history import StepPoint, parse_history
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.journal import MAX_TIME, Entry, parse_entry
from dalsegno.runs.status import RunStatus, has_valid_times, status_from_json
from dalsegno.spec.facts import facts_from_json
from dalsegno.system.files import user_of
from dalsegno.web.snapshot import RunPicture

MAX_STATUS_BYTES = 256 << 10
MAX_PROGRESS_BYTES = 64 << 10
MAX_HISTORY_BYTES = 1 << 20
MAX_JOURNAL_BYTES = 2 << 20  # only the end of a longer journal is read
MAX_ENTRIES = 5000
MAX_PLAN_BYTES = 256 << 10
MAX_GPUS_PER_NODE = 1024


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
    # The status file may name another user, so the user is taken from the owner of the folder.
    return RunPicture(record.folder, record.uid, replace(status, user=user_of(record.uid)), progress, kept)


def _status(value: Mapping[str, object] | None) -> RunStatus | None:
    with contextlib.suppress(DalsegnoError, TypeError, ValueError):
        status = status_from_json(value) if value else None
        return status if status and has_valid_times(status) else None
    return None


def _progress(value: Mapping[str, object] | None) -> TrainingProgress | None:
    with contextlib.suppress(DalsegnoError, TypeError, ValueError):
        progress = facts_from_json(TrainingProgress, value) if value else None
        spent = progress.account.spent.values() if progress else ()
        return progress if all(0 <= seconds < MAX_TIME for seconds in spent) else None
    return None


def read_gpus_per_node(record: RunRecord) -> int:
    """Return the number of GPUs per node that a run requested; 0 if the run's plan does not contain the number."""
    found: object = _value(record, RunFolder(Path(record.folder)).plan, MAX_PLAN_BYTES)
    for name in ("request", "gpus_per_node", "count"):
        found = found.get(name) if isinstance(found, dict) else None
    return min(max(found, 0), MAX_GPUS_PER_NODE) if isinstance(found, int) else 0


def read_points(record: RunRecord) -> tuple[StepPoint, ...]:
    """Return the history of a run's loss and step time."""
    return parse_history(_value(record, RunFolder(Path(record.folder)).history, MAX_HISTORY_BYTES))


def read_entries(record: RunRecord, most: int = MAX_JOURNAL_BYTES) -> list[Entry]:
    """Return the last entries of a run's journal. Nested values are left out."""
    name = RunFolder(Path(record.folder)).journal.name
    text = read_owned(record.folder, name, record.uid, most, end=True) or b""
    return list(_entries(text.decode(errors="replace").splitlines()[-MAX_ENTRIES:]))


def _entries(lines: list[str]) -> Iterator[Entry]:
    for line in lines:
        entry = parse_entry(line)
        if entry is not None and isinstance(entry.get("event"), str):
            yield {key: value for key, value in entry.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    """Return whether a value is a scalar or a list of scalars. Deeper values could exceed Python's recursion limit."""
    if isinstance(value, list):
        return all(isinstance(each, (str, int, float)) for each in value)
    return value is None or isinstance(value, (str, int, float))
