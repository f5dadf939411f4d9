"""Checksums of a slot, made after the commit by whoever has the time, and checked before it is trusted."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path

from dalsegno.train.memory.owned import open_own
from dalsegno.train.memory.record import (
    HEADER,
    SUMS_AT,
    Record,
    Sums,
    parse_record,
    parse_sums,
    sums_are_damaged,
)
from dalsegno.train.memory.snapshot import Snapshot, open_snapshot, read_header

_CHUNK = 16 << 20


class Verdict(Enum):
    WHOLE = "whole"
    UNCHECKED = "committed, not checksummed yet"
    DAMAGED = "damaged"
    NOTHING = "nothing committed"


def checksum(path: Path, threads: int = 2) -> Sums | None:
    """Write the slot's checksums; None if it holds nothing, or was overwritten meanwhile."""
    snapshot = open_snapshot(path)
    if snapshot is None:
        return None
    sums = sums_of(snapshot, threads)
    fd = open_own(path, os.O_RDWR)
    if fd is None:
        return None
    try:
        if parse_record(os.pread(fd, HEADER, 0)) != snapshot.record:
            return None
        # Should a writer come in between, these sums bear another number than its snapshot, and count for nothing.
        os.pwrite(fd, sums.pack(), SUMS_AT)
        return sums
    finally:
        os.close(fd)


def verify(path: Path, threads: int = 2) -> Verdict:
    """Whether every byte is as it was when the checksums were made."""
    snapshot = open_snapshot(path)
    if snapshot is not None:
        return judge(snapshot, threads)
    return Verdict.DAMAGED if any(read_header(path)) else Verdict.NOTHING


def judge(snapshot: Snapshot, threads: int = 2) -> Verdict:
    """The same of one that is open already: what was read here need not be mapped again to be loaded."""
    header = read_header(snapshot.path)
    if parse_record(header) != snapshot.record:
        return Verdict.NOTHING  # overwritten since
    if sums_are_damaged(header):
        return Verdict.DAMAGED
    sums = parse_sums(header)
    if sums is None or sums.seq != snapshot.record.seq:
        return Verdict.UNCHECKED
    return Verdict.WHOLE if sums_of(snapshot, threads) == sums else Verdict.DAMAGED


def sums_of(snapshot: Snapshot, threads: int = 2) -> Sums:
    record: Record = snapshot.record
    shared, own = (sum_of(snapshot.part(extent), threads) for extent in (record.shared, record.own))
    return Sums(record.seq, shared, own)


def sum_of(part: memoryview, threads: int = 2) -> int:
    """The checksum of the chunks' checksums: those can be made side by side."""
    chunks = [part[at : at + _CHUNK] for at in range(0, len(part), _CHUNK)]
    if len(chunks) < 2 or threads < 2:
        return _together(map(zlib.crc32, chunks))
    with ThreadPoolExecutor(threads) as pool:
        return _together(pool.map(zlib.crc32, chunks))


def _together(sums: Iterable[int]) -> int:
    return zlib.crc32(b"".join(one.to_bytes(4, "little") for one in sums))
