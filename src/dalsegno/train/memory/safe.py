"""The safe step: the newest one that every rank has, and a second node too. The agent writes it, workers read it."""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

_FORM = struct.Struct("<qI")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, order=True)
class Safe:
    """A step of a generation. What an earlier generation had safe says nothing about this one."""

    generation: int
    step: int


NOTHING_SAFE = Safe(0, -1)


def write_safe(path: Path, safe: Safe) -> None:
    """Whoever reads meanwhile reads the old one or this one."""
    raw = _FORM.pack(safe.step, safe.generation)
    new = path.with_name(f"{path.name}-new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, raw + _CRC.pack(zlib.crc32(raw)))
    finally:
        os.close(fd)
    os.replace(new, path)


def read_safe(path: Path) -> Safe | None:
    """None if nobody replicates, so that every committed step is as safe as it can be. Damaged: nothing is safe."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(raw) != _FORM.size + _CRC.size or _CRC.unpack_from(raw, _FORM.size)[0] != zlib.crc32(raw[: _FORM.size]):
        return NOTHING_SAFE
    step, generation = _FORM.unpack_from(raw)
    return Safe(generation, step)
