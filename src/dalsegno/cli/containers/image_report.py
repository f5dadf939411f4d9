"""The output of `dalsegno image`: import progress, images as tables, text and JSON, and the result of `verify`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.cli import out
from dalsegno.cli.out import size
from dalsegno.errors import NotThere, UsageError
from dalsegno.printable import one_line

if TYPE_CHECKING:
    from dalsegno.containers.image_metadata import ImageContents
    from dalsegno.containers.store import ImageStore, Stored

_WIDTH = 24
_EVERY_S = 0.1
_EVERY_PLAIN_S = 5.0
HEADERS = ("IMAGE", "DIGEST", "ARCH", "SIZE", "AGE")


class ImportBar:
    """A progress bar that several threads may update."""

    def __init__(self, quiet: bool = False) -> None:
        self._lock = threading.Lock()
        self._live = sys.stderr.isatty() and not quiet
        self._quiet = quiet
        self._text, self._done, self._total, self._here = "", 0, 0, 0
        self._began = self._shown = time.monotonic()

    def stage(self, text: str, total: int = 0, here: int = 0) -> None:
        with self._lock:
            self._text, self._done, self._total, self._here = text, 0, total, here
            self._began = self._shown = time.monotonic()
            if not self._quiet:
                had = f": {size(here)} of {size(total)} already downloaded" if here else ""
                self._show(plain=f"{text}{had}")

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if self._quiet or now - self._shown < (_EVERY_S if self._live else _EVERY_PLAIN_S):
                return
            self._shown = now
            self._show(plain=f"{self._text}: {self._share():.0%}" if self._total else self._text)

    def warn(self, text: str) -> None:
        with self._lock:
            self._clear()
            out.warn(text)

    def line(self, text: str) -> None:
        """Print a line of another program's output."""
        if not self._quiet:
            with self._lock:
                self._clear()
                out.talk(text)

    def close(self) -> None:
        with self._lock:
            self._clear()

    def _share(self) -> float:
        return min(1.0, max(0.0, self._done / self._total)) if self._total else 0.0

    def _show(self, plain: str) -> None:
        if not self._live:
            out.talk(plain)
            return
        line = self._text
        if self._total:
            full = round(self._share() * _WIDTH)
            rate = max(0, self._done - self._here) / max(time.monotonic() - self._began, 0.1)
            line += f"  {'━' * full}{'─' * (_WIDTH - full)}  {size(self._done)} of {size(self._total)}, {size(rate)}/s"
        out.replace_line(line)

    def _clear(self) -> None:
        if self._live:
            out.replace_line("")


def rows(stored: Stored) -> list[list[str]]:
    """Return one table row per name of the image."""
    record = stored.record
    about = [record.hex[:12], record.arch or "?", size(record.size), age(time.time() - record.imported)]
    return [[name, *about] for name in stored.names or ("-",)]


def as_json(stored: Stored) -> dict[str, object]:
    record = stored.record
    return {
        "names": list(stored.names), "digest": record.digest, "arch": record.arch, "size": record.size,
        "compression": record.compression, "sha256": record.sha256, "imported": record.imported,
        "created": record.created, "path": str(stored.path), "layers": list(record.layers), "env": list(record.env),
        "entrypoint": list(record.entrypoint), "cmd": list(record.cmd), "workdir": record.workdir,
    }  # fmt: skip


def lines(stored: Stored) -> list[str]:
    """Return the details of an image as text lines."""
    import shlex

    record = stored.record
    pairs = {
        "image": ", ".join(stored.names) or "-", "digest": record.digest, "file": str(stored.path),
        "size": f"{size(record.size)} ({record.compression})", "arch": record.arch or "?", "created": record.created,
        "workdir": record.workdir, "entrypoint": shlex.join(record.entrypoint), "cmd": shlex.join(record.cmd),
    }  # fmt: skip
    env = [("env" if not number else "", each) for number, each in enumerate(record.env)]
    return _aligned([*((key, value) for key, value in pairs.items() if value), *env])


def inside_as_json(path: str, inside: ImageContents) -> dict[str, object]:
    return {
        "path": path, "env": inside.env, "workdir": inside.workdir, "entrypoint": inside.entrypoint, "cmd": inside.cmd,
    }  # fmt: skip


def inside_lines(path: str, inside: ImageContents) -> list[str]:
    import shlex

    pairs = [("file", path), ("workdir", inside.workdir)]
    pairs += [("entrypoint", shlex.join(inside.entrypoint))] if inside.entrypoint else []
    pairs += [("cmd", shlex.join(inside.cmd))] if inside.cmd else []
    pairs += [("env" if not number else "", f"{k}={v}") for number, (k, v) in enumerate(inside.env.items())]
    return _aligned(pairs)


def _aligned(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return one line per pair. The values come from the image, so line breaks in them are escaped."""
    return [f"{key:<12}{one_line(value)}" for key, value in pairs]


def age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


_LISTS = "`dalsegno image ls` lists the stored images"


def find_image(store: ImageStore, image: str) -> Stored:
    """Return a stored image by name, digest or path. Raise an error that says what is wrong with the argument."""
    try:
        return store.find(image)
    except NotThere:
        if image.startswith(("/", "./", "../")) and not os.path.lexists(image):
            raise NotThere(f"{image}: no such file", hint=_LISTS) from None
        if not os.path.exists(image):
            raise
        if not Path(image).is_file():
            raise UsageError(f"{image} is not a regular file", hint=_LISTS) from None
        raise UsageError(f"{image} is not a .sqsh file", hint=_LISTS) from None


@dataclass(frozen=True)
class ImageVerdict:
    """The result of verifying one image: its name, its size, and either its fault or a confirmation."""

    title: str
    facts: dict[str, object]
    fault: str = ""
    confirmation: str = "whole"


def verdict_of(image: str, store: ImageStore, bar: ImportBar) -> ImageVerdict:
    path = Path(os.path.abspath(image))
    if image.endswith(".sqsh") and path.is_file() and path not in [each.path for each in store.all()]:
        return _file_verdict(path, store, bar)
    stored = find_image(store, image)
    verdict = ImageVerdict(stored.names[0] if stored.names else stored.record.hex[:12], as_json(stored))
    sha256, fault = _read(stored.path, bar)
    if not fault and sha256 != stored.record.sha256:
        fault = "damaged; remove it and import it again"
    return replace(verdict, fault=fault)


def _file_verdict(path: Path, store: ImageStore, bar: ImportBar) -> ImageVerdict:
    from dalsegno.containers.image_metadata import check_squashfs
    from dalsegno.system.processes import LocalRunner

    sha256, fault = _read(path, bar)
    written, name = store.written(path), store.find_name_of(sha256)
    verdict = ImageVerdict(str(path), {"path": str(path), "sha256": sha256, "names": [name] if name else []}, fault)
    if fault or name:
        return replace(verdict, confirmation=f"whole: {name}")
    if written:
        return replace(verdict, fault=f"differs from what was written there for {written.name}; import it again")
    if damage := check_squashfs(path, LocalRunner()):
        return replace(verdict, fault=f"damaged: {damage}")
    return replace(
        verdict, confirmation="readable to its end; its origin is unknown, so the content cannot be compared"
    )


def _read(path: Path, bar: ImportBar) -> tuple[str, str]:
    """Return the digest of the file and "". If the file cannot be read, return "" and the reason."""
    from dalsegno.containers.import_image import sha256_of

    try:
        bar.stage(f"reading {path.name}", path.stat().st_size)
        return sha256_of(path, bar.advance), ""
    except OSError as error:
        return "", f"cannot be read: {error.strerror}"
