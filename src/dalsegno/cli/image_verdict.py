"""Whether an image is what was imported: every byte of it is read."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.cli import image_words
from dalsegno.cli.image_progress import Bar
from dalsegno.errors import NotThere, UsageError

if TYPE_CHECKING:
    from dalsegno.containers.store import Store, Stored

_LISTS = "`dalsegno image ls` lists the images kept here"


def find_image(store: Store, image: str) -> Stored:
    """By name or path; what is none says why."""
    try:
        return store.find(image)
    except NotThere:
        if image.startswith(("/", "./", "../")) and not os.path.lexists(image):
            raise NotThere(f"{image}: no such file", hint=_LISTS) from None
        if not os.path.exists(image):
            raise
        if not Path(image).is_file():
            raise UsageError(f"{image} is no regular file", hint=_LISTS) from None
        raise UsageError(f"{image} is no .sqsh file", hint=_LISTS) from None


@dataclass(frozen=True)
class Verdict:
    """Of one image: what is known of it, and its fault or what speaks for it."""

    title: str
    facts: dict[str, object]
    fault: str = ""
    praise: str = "whole"


def verdict_of(image: str, store: Store, bar: Bar) -> Verdict:
    path = Path(os.path.abspath(image))
    if image.endswith(".sqsh") and path.is_file() and path not in [each.path for each in store.all()]:
        return _file_verdict(path, store, bar)
    stored = find_image(store, image)
    told = Verdict(stored.names[0] if stored.names else stored.record.hex[:12], image_words.as_json(stored))
    sha256, fault = _read(stored.path, bar)
    if not fault and sha256 != stored.record.sha256:
        fault = "damaged; remove and import it again"
    return replace(told, fault=fault)


def _file_verdict(path: Path, store: Store, bar: Bar) -> Verdict:
    from dalsegno.containers.image_metadata import read_through
    from dalsegno.system.processes import LocalRunner

    sha256, fault = _read(path, bar)
    written, name = store.written(path), store.known_as(sha256)
    told = Verdict(str(path), {"path": str(path), "sha256": sha256, "names": [name] if name else []}, fault)
    if fault or name:
        return replace(told, praise=f"whole: {name}")
    if written:
        return replace(told, fault=f"not what was written there for {written.name}; import it again")
    if said := read_through(path, LocalRunner()):
        return replace(told, fault=f"damaged: {said}")
    return replace(told, praise="can be read to its end; what it should be is not known here")


def _read(path: Path, bar: Bar) -> tuple[str, str]:
    """Its digest; or why there is none."""
    from dalsegno.containers.import_image import sha256_of

    try:
        bar.stage(f"reading {path.name}", path.stat().st_size)
        return sha256_of(path, bar.advance), ""
    except OSError as error:
        return "", f"cannot be read: {error.strerror}"
