"""A part: what one rank says of the file it has written, left beside it for rank 0 to put together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Union

from dalsegno.train.disk.manifest import FileMark

PathStep = Union[str, int]


@dataclass(frozen=True)
class Chunk:
    """A box cut out of a tensor."""

    dtype: str  # as torch calls it: "bfloat16"
    size: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One thing in a data file: a chunk of a tensor, or, without a chunk, any other value."""

    key: str
    at: int
    length: int
    chunk: Chunk | None = None


@dataclass(frozen=True)
class Part:
    rank: int
    world: int
    file: str
    mark: FileMark
    entries: Sequence[Entry]
    torch: str
    paths: Mapping[str, Sequence[PathStep]] = field(default_factory=dict)  # of every key, from rank 0 alone
    prints: Mapping[str, int] = field(default_factory=dict)  # of what every rank holds


def render_part(part: Part) -> bytes:
    return json.dumps({**asdict(part), "mark": list(part.mark)}).encode()


def parse_part(text: bytes) -> Part:
    content = json.loads(text)
    entries = [Entry(each["key"], each["at"], each["length"], _chunk(each["chunk"])) for each in content["entries"]]
    return Part(**{**content, "mark": FileMark(*content["mark"]), "entries": entries})


def _chunk(content: Mapping[str, Sequence[int]] | None) -> Chunk | None:
    if content is None:
        return None
    boxes = (tuple(content[name]) for name in ("size", "offsets", "sizes"))
    return Chunk(str(content["dtype"]), *boxes)
