"""What no snapshot may be overwritten before: the coordinator's word on it. The agent writes it, workers read it."""

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

Place = tuple[int, int]  # in the run's history: a generation, and a step of it
NOWHERE: Place = (0, -1)


@dataclass(frozen=True)
class Safe:
    """Said to one generation. A later word only ever gives more up, so who has not heard it yet keeps too much."""

    generation: int
    place: Place = NOWHERE  # the newest that no single node takes along; it may be of an earlier generation
    resumed: Place = NOWHERE  # what this generation went on from
    floor: int = 0  # steps of this generation before it are given up: not all ranks have them, or no buddy took them

    def needs(self, place: Place) -> bool:
        """Whether the run may have to go back to it."""
        if place == self.place or place[0] > self.generation:
            return True
        if place[0] == self.generation:
            return place > self.place and place[1] >= self.floor
        return place == self.resumed and self.place[0] < self.generation


NOTHING_SAFE = Safe(0)


def render_word(safe: Safe) -> dict[str, Any]:
    """As coordinator and agent say it."""
    return {
        "generation": safe.generation, "place": list(safe.place), "resumed": list(safe.resumed), "floor": safe.floor,
    }  # fmt: skip


def parse_word(told: Mapping[str, Any]) -> Safe:
    return Safe(int(told["generation"]), _place(told["place"]), _place(told["resumed"]), int(told["floor"]))


def _place(told: Any) -> Place:
    generation, step = told
    return int(generation), int(step)


def write_safe(path: Path, safe: Safe) -> None:
    """Whoever reads meanwhile reads the old one or this one."""
    raw = _FORM.pack(safe.generation, safe.floor, *safe.place, *safe.resumed)
    new = path.with_name(f"{path.name}-new")
    fd = create_own(new)
    try:
        os.write(fd, raw + _CRC.pack(zlib.crc32(raw)))
    finally:
        os.close(fd)
    os.replace(new, path)


def read_safe(path: Path) -> Safe | None:
    """None if nobody replicates, so that every committed step is as safe as it can be. Damaged: nothing is safe."""
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
    return Safe(generation, (places[0], places[1]), (places[2], places[3]), floor)
