"""Import the images that the cluster file lists, when the cluster is up. Images that are already stored stay as they
are."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.image_name import parse_name
from dalsegno.system.files import explain
from dalsegno.system.machine import program
from dalsegno.targets.base import Say

if TYPE_CHECKING:
    from dalsegno.containers.import_image import Importer

EVERY_S = 2.0


def present(folder: Path, images: Iterable[str]) -> frozenset[str]:
    """Return the images that are already stored. Registries are not asked for newer versions."""
    importer = _importer(folder, lambda _: None, "")
    return frozenset(
        image
        for image in images
        if importer.store.lookup(str(parse_name(image).absolute()), importer.arch, importer.compression, since=0.0)
    )


def import_all(folder: Path, images: Iterable[str], say: Say, cluster: str) -> None:
    """Import all images, and report all failures together at the end."""
    failed = [(image, error) for image in images if (error := _import(folder, image, say)) is not None]
    if failed:
        raise failure(cluster, failed)


def failure(cluster: str, failed: Sequence[tuple[str, DalsegnoError]]) -> TargetError:
    """Return one error for all failed images. A hint that all failures share is given once. Otherwise each failure has
    its own hint."""
    hints = {error.hint for _, error in failed}
    shared = hints.pop() if len(hints) == 1 else ""
    own = [f" ({error.hint})" if error.hint and not shared else "" for _, error in failed]
    lines = [f"\n  {image}: {error.what}{hint}" for (image, error), hint in zip(failed, own, strict=True)]
    hint = "; ".join(each for each in (shared, "`dalsegno up` tries again") if each)
    count = f"{len(failed)} image{'s' * (len(failed) > 1)}"
    return TargetError(f"{cluster} is up, but {count} could not be imported:{''.join(lines)}", hint=hint)


def _import(folder: Path, image: str, say: Say) -> DalsegnoError | None:
    try:
        _importer(folder, say, image).to_store(parse_name(image))
    except DalsegnoError as error:
        return error
    except OSError as error:
        return explain(error, folder)
    return None


def _importer(folder: Path, say: Say, image: str) -> Importer:
    from dalsegno.containers.import_image import Importer  # imported here, because it imports an HTTP client
    from dalsegno.containers.store import open_store

    return Importer(open_store(folder, folder), ImportLines(say, image), enroot=program("enroot") or "")


class ImportLines:
    """Reports the progress of an import through `say`."""

    def __init__(self, say: Say, image: str) -> None:
        self._say, self._image = say, image
        self._lock = threading.Lock()
        self._text, self._done, self._total, self._said = "", 0, 0, 0.0

    def stage(self, text: str, total: int = 0, here: int = 0) -> None:
        with self._lock:
            self._text, self._done, self._total, self._said = text, 0, total, time.monotonic()
            self._say(f"{self._image}: {text}{f', {here / total:.0%} is here already' if here else ''}")

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._total and time.monotonic() - self._said >= EVERY_S:
                self._said = time.monotonic()
                self._say(f"{self._image}: {self._text}, {min(1.0, self._done / self._total):.0%}")

    def warn(self, text: str) -> None:
        with self._lock:
            self._say(f"{self._image}: warning: {text}")
