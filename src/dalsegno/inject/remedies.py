"""Which recorded faults a remedy ends, and machines that are bad when they replace another."""

from __future__ import annotations

from pathlib import Path

from dalsegno.health.result import Remedy
from dalsegno.inject.records import FaultRecord, forget, read_records, record

BAD_REPLACEMENT = "bad-replacement"


def end_faults(folder: Path, remedy: Remedy) -> None:
    """Forget the faults that this remedy ends. A replacement that was declared bad gets a fault of its own."""
    for fault in read_records(folder):
        if fault.fault != BAD_REPLACEMENT and not remedy < fault.ended_by:
            forget(folder, fault)
    bad = _bad_replacement(folder)
    if bad is not None and remedy is Remedy.REPLACE:
        _spoil(folder, bad)


def brings_old_gpus(folder: Path) -> bool:
    """Return whether the next replacement has the same GPUs as the machine that it replaces."""
    bad = _bad_replacement(folder)
    return bool(bad and bad.options.get("same"))


def _bad_replacement(folder: Path) -> FaultRecord | None:
    return next((fault for fault in read_records(folder) if fault.fault == BAD_REPLACEMENT), None)


def _spoil(folder: Path, bad: FaultRecord) -> None:
    left = int(bad.options.get("count", 1)) - 1
    if not bad.options.get("same"):
        record(folder, "ecc", bad.node, {"count": 7, "mended_by": Remedy.REPLACE.value})
    if left:
        record(folder, BAD_REPLACEMENT, bad.node, {**bad.options, "count": left})
    else:
        forget(folder, bad)
