"""What the store knows of an image it keeps, as JSON beside it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from dalsegno.containers.manifest import Config
from dalsegno.system.files import read_text, write_atomic


@dataclass(frozen=True)
class Record:
    """One .sqsh of the store."""

    digest: str  # of the manifest: what a registry calls it by
    compression: str
    size: int
    sha256: str  # of the file itself
    imported: float  # when, in seconds since 1970
    arch: str = ""
    created: str = ""
    layers: tuple[str, ...] = ()  # their digests
    env: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    workdir: str = "/"

    @property
    def hex(self) -> str:
        return self.digest.partition(":")[2]


@dataclass(frozen=True)
class Tag:
    """A name, and the image that it meant when it was last asked for."""

    name: str
    digest: str
    compression: str
    arch: str
    seen: float


@dataclass(frozen=True)
class Written:
    """A .sqsh that was written outside of the store, at `-o FILE`."""

    path: str
    name: str  # what it was made of
    sha256: str


def with_config(record: Record, config: Config, workdir: str) -> Record:
    return replace(
        record, arch=config.arch, created=config.created, env=config.env, entrypoint=config.entrypoint, cmd=config.cmd,
        workdir=workdir,
    )  # fmt: skip


def write(path: Path, value: Record | Tag | Written) -> None:
    write_atomic(path, json.dumps(asdict(value), indent=1) + "\n", 0o644)


def read_record(path: Path) -> Record | None:
    """None if it is missing or not ours: then there is no such image."""
    value = _read(path)
    names = {each.name for each in fields(Record)}
    if value is None or not {"digest", "compression", "size", "sha256", "imported"} <= set(value):
        return None
    known = {key: tuple(each) if isinstance(each, list) else each for key, each in value.items() if key in names}
    return Record(**known)  # type: ignore[arg-type]


def read_tag(path: Path) -> Tag | None:
    value = _read(path)
    if value is None or not {each.name for each in fields(Tag)} <= set(value):
        return None
    return Tag(**{each.name: value[each.name] for each in fields(Tag)})  # type: ignore[arg-type]


def read_written(path: Path) -> Written | None:
    value = _read(path)
    if value is None or not all(isinstance(value.get(each.name), str) for each in fields(Written)):
        return None
    return Written(**{each.name: str(value[each.name]) for each in fields(Written)})


def _read(path: Path) -> dict[str, object] | None:
    try:
        value = json.loads(read_text(path) or "null")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
