"""The names and formats of the files in a checkpoint folder. Pure: nothing is read or written.

step-000000001234/               a checkpoint: __0_0.distcp, __1_0.distcp … .metadata, MANIFEST.json
latest                           a link to the newest checkpoint
.step-000000001240.RUN.g3.tmp/   a checkpoint that is being written
.trash-step-000000001000.…/      a checkpoint that is being removed
.dalsegno.lock                   held by the run that writes here
before-20260131-235959/          checkpoints that `--fresh` has moved aside
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Union
from urllib.parse import quote, unquote

MANIFEST = "MANIFEST.json"
METADATA = ".metadata"
LATEST = "latest"
LOCK = ".dalsegno.lock"
ASIDE = "before-"
SHELL = "dalsegno.shell"  # key of our own entry beside torch's entries

_STEP = re.compile(r"step-(\d{12,})")
_TEMPORARY = re.compile(r"\.step-(\d{12,})\.(.*)\.g(\d+)\.tmp")
_TRASH = re.compile(r"\.trash-step-\d{12,}\..+")


class TemporaryName(NamedTuple):
    """The name of a checkpoint that is being written: its step, run and generation."""

    step: int
    run: str
    generation: int

    @property
    def name(self) -> str:
        return f".{step_name(self.step)}.{quote(self.run, safe='')}.g{self.generation}.tmp"


def checkpointer_name(run: str, number: int) -> str:
    """Return the name under which the Checkpointer with this number, counted from 0, writes."""
    return f"{run}.{number}" if number else run


def is_of(name: str, run: str) -> bool:
    """Return whether the name belongs to one of the run's Checkpointers."""
    return name == run or re.fullmatch(re.escape(run) + r"\.\d+", name) is not None


def step_name(step: int) -> str:
    return f"step-{step:012d}"


def parse_step(name: str) -> int | None:
    """Return the step of a checkpoint's folder; None for any other name, even `step-5` or `step-…-copy`."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and step_name(int(found[1])) == name else None


def parse_temporary(name: str) -> TemporaryName | None:
    found = _TEMPORARY.fullmatch(name)
    return TemporaryName(int(found[1]), unquote(found[2]), int(found[3])) if found else None


def trash_name(step: int, unique: str) -> str:
    return f".trash-{step_name(step)}.{unique}"


def is_trash(name: str) -> bool:
    return _TRASH.fullmatch(name) is not None


def data_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def part_name(rank: int) -> str:
    return f"part-{rank}.json"


def failed_name(rank: int) -> str:
    """Return the name of the file in which a rank reports that it could not write its share."""
    return f"failed-{rank}.txt"


def own_key(rank: int) -> str:
    return f"dalsegno.own.{rank}"


# Manifest: the files of a checkpoint with sizes and checksums. It is the last file written before the folder is renamed

FORMAT = 1


class FileMark(NamedTuple):
    """The size and checksum of one file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class CheckpointManifest:
    step: int
    world: int  # number of ranks that wrote it; any number of ranks can read it
    run: str
    generation: int
    torch: str
    time: str  # when it was written, for display only
    files: Mapping[str, FileMark]

    @property
    def bytes(self) -> int:
        return sum(mark.bytes for mark in self.files.values())


def render(manifest: CheckpointManifest) -> str:
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


def parse(text: str) -> CheckpointManifest:
    """Parse the text of a manifest. Raise ValueError with the reason if the text is invalid."""
    try:
        content = json.loads(text)
        manifest = _manifest(content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError("is not a manifest, or is damaged") from error
    if content.get("format") != FORMAT:
        raise ValueError(f"has format {content.get('format')}, written by a newer version")
    if render(manifest) != text:
        raise ValueError("does not match its own checksum")
    return manifest


def _manifest(content: Mapping[str, Any]) -> CheckpointManifest:
    files = {name: FileMark(mark["bytes"], int(mark["crc32"], 16)) for name, mark in content["files"].items()}
    return CheckpointManifest(
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


# Part: one rank's description of its data file, for rank 0 to merge

PathStep = Union[str, int]


@dataclass(frozen=True)
class Chunk:
    """A rectangular slice of a tensor."""

    dtype: str  # torch's name, for example "bfloat16"
    size: tuple[int, ...]  # size of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class DataEntry:
    """One entry of a data file: a chunk of a tensor or, if `chunk` is None, any other value."""

    key: str
    at: int
    length: int
    chunk: Chunk | None = None


@dataclass(frozen=True)
class RankPart:
    rank: int
    world: int
    file: str
    mark: FileMark
    entries: Sequence[DataEntry]
    torch: str
    paths: Mapping[str, Sequence[PathStep]] = field(default_factory=dict)  # key -> path in the state; only from rank 0
    prints: Mapping[str, int] = field(default_factory=dict)  # fingerprints of the tensors that every rank has in full


def render_part(part: RankPart) -> bytes:
    return json.dumps({**asdict(part), "mark": list(part.mark)}).encode()


def parse_part(text: bytes) -> RankPart:
    content = json.loads(text)
    entries = [DataEntry(each["key"], each["at"], each["length"], _chunk(each["chunk"])) for each in content["entries"]]
    return RankPart(**{**content, "mark": FileMark(*content["mark"]), "entries": entries})


def _chunk(content: Mapping[str, Sequence[int]] | None) -> Chunk | None:
    if content is None:
        return None
    boxes = (tuple(content[name]) for name in ("size", "offsets", "sizes"))
    return Chunk(str(content["dtype"]), *boxes)
