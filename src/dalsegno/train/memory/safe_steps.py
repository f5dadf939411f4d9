"""The safe step, which decides which snapshots a run still needs.

The coordinator determines the safe step, and the agent writes it to a file.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dalsegno.train.memory.files import create_own, open_own

_FORM = struct.Struct("<IqIqIq")
_CRC = struct.Struct("<I")

Place = tuple[int, int]  # a position in the run's history: generation and step
NOWHERE: Place = (0, -1)


@dataclass(frozen=True)
class SafeSteps:
    """The snapshots that a run needs in one generation.

    A newer value only releases more snapshots, so a stale value is harmless.
    """

    generation: int
    place: Place = NOWHERE  # the newest position that survives the loss of any node; it may be in an earlier generation
    resumed: Place = NOWHERE  # the position from which this generation resumed
    floor: int = 0  # earlier steps of this generation are abandoned, because some ranks or all buddies lack them

    def needs(self, place: Place) -> bool:
        """Return whether the run may have to resume from this position."""
        if place == self.place or place[0] > self.generation:
            return True
        if place[0] == self.generation:
            return place > self.place and place[1] >= self.floor
        return place == self.resumed and self.place[0] < self.generation


NOTHING_SAFE = SafeSteps(0)


def render_safe_steps(safe: SafeSteps) -> dict[str, Any]:
    """Return the message from the coordinator to the agent."""
    return {
        "generation": safe.generation, "place": list(safe.place), "resumed": list(safe.resumed), "floor": safe.floor,
    }  # fmt: skip


def parse_safe_steps(message: Mapping[str, Any]) -> SafeSteps:
    place, resumed = _place(message["place"]), _place(message["resumed"])
    return SafeSteps(int(message["generation"]), place, resumed, int(message["floor"]))


def _place(value: Any) -> Place:
    generation, step = value
    return int(generation), int(step)


def write_safe(path: Path, safe: SafeSteps) -> None:
    """Write the safe step atomically. A concurrent reader gets the old value or the new one."""
    raw = _FORM.pack(safe.generation, safe.floor, *safe.place, *safe.resumed)
    new = path.with_name(f"{path.name}-new")
    fd = create_own(new)
    try:
        os.write(fd, raw + _CRC.pack(zlib.crc32(raw)))
    finally:
        os.close(fd)
    os.replace(new, path)


def read_safe(path: Path) -> SafeSteps | None:
    """Read the safe step. Return None if there is no file: without replication, every committed step is safe.

    If the file is damaged, nothing is safe.
    """
    fd = open_own(path)
    if fd is None:
        return None
    try:
        raw = os.pread(fd, _FORM.size + _CRC.size + 1, 0)
    finally:
        os.close(fd)
    if len(raw) != _FORM.size + _CRC.size or _CRC.unpack_from(raw, _FORM.size)[0] != zlib.crc32(raw[: _FORM.size]):
        return NOTHING_SAFE
    generation, floor, *places = _FORM.unpack_from(raw)
    return SafeSteps(generation, (places[0], places[1]), (places[2], places[3]), floor)
