"""The manifest: what a checkpoint consists of, with sizes and checksums. Written last, it makes a folder a checkpoint.

Any changed byte of it shows: what it says is covered by its checksum, and it is written in one way only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

FORMAT = 1


class FileMark(NamedTuple):
    """Size and checksum of one file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    step: int
    world: int  # ranks that wrote it; any number can read it
    run: str
    generation: int
    torch: str
    time: str  # for people; nothing is decided by it
    files: Mapping[str, FileMark]

    @property
    def bytes(self) -> int:
        return sum(mark.bytes for mark in self.files.values())


def render(manifest: Manifest) -> str:
    content: dict[str, Any] = {
        "format": FORMAT,
        "step": manifest.step,
        "world": manifest.world,
        "run": manifest.run,
        "generation": manifest.generation,
        "torch": manifest.torch,
        "time": manifest.time,
        "files": {
            name: {"bytes": mark.bytes, "crc32": f"{mark.crc32:08x}"} for name, mark in sorted(manifest.files.items())
        },
    }
    return json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n"


def parse(text: str) -> Manifest:
    """Raises ValueError, with what is wrong, for anything but a text that `render` gave."""
    try:
        content = json.loads(text)
        manifest = _manifest(content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError("is no manifest, or a damaged one") from error
    if content.get("format") != FORMAT:
        raise ValueError(f"has format {content.get('format')}, written by a newer version")
    if render(manifest) != text:
        raise ValueError("does not match its own checksum")
    return manifest


def _manifest(content: Mapping[str, Any]) -> Manifest:
    files = {name: FileMark(mark["bytes"], int(mark["crc32"], 16)) for name, mark in content["files"].items()}
    return Manifest(
        step=content["step"],
        world=content["world"],
        run=content["run"],
        generation=content["generation"],
        torch=content["torch"],
        time=content["time"],
        files=files,
    )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
