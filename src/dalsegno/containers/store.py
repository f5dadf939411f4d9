"""The image store: a folder with images (by manifest digest), layers (by their own digest) and names.

    FOLDER/
      images/HEX.lz4.sqsh     a complete image
      images/HEX.lz4.json     its record; written last, so a .sqsh file without a record is incomplete
      blobs/HEX               a layer, as in the registry; HEX.part during its download
      tags/….json             a name, and the image that it referred to at the last lookup
      files/….json            a file elsewhere that was written with `-o`, and its digest
      locks/                  held during imports, released when the process that holds them ends

If a tag moves to another digest, it refers to another file. An image in use therefore never changes.

Only the store's owner can write to these folders. Files and folders of other users are refused or ignored, and root
stores no images below a folder that other users can change.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dalsegno.containers.image_metadata import (
    ImageRecord,
    Tag,
    WrittenImage,
    read_record,
    read_tag,
    read_written,
    write,
)
from dalsegno.errors import DalsegnoError, NotThere, UsageError
from dalsegno.hardware.catalog import did_you_mean
from dalsegno.image_name import parse_name
from dalsegno.system.files import explain, in_turn, locked
from dalsegno.system.ownership import is_ours, make_own_folder, part_of_others, trusted_owners

_ELSEWHERE = "remove it, or name another folder: DALSEGNO_IMAGES, or `containers.folder` in the cluster file"
_FOLDERS = ("images", "blobs", "tags", "files", "locks")
_PREFIX = re.compile(r"(?:sha256:)?([0-9a-f]{1,64})")


@dataclass(frozen=True)
class Stored:
    """An image in the store, with its names."""

    record: ImageRecord
    path: Path
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class RemovedFiles:
    """The number and total size of removed files."""

    files: int
    size: int


class ImageStore:
    """A folder of images. Processes on all nodes that see the folder may use it at the same time."""

    def __init__(
        self,
        folder: Path,
        shared: Path | None = None,
        clock: Callable[[], float] = time.time,
        owners: frozenset[int] | None = None,
    ) -> None:
        """Open the store in `folder`.

        `shared` is root's store, which is only read. Files of users other than `owners` are ignored; None means root
        and this user.
        """
        self.folder = folder
        self.clock = clock
        self._owners = frozenset({0, os.geteuid()}) if owners is None else owners
        self.shared = ImageStore(shared, owners=frozenset({0})) if shared and _is_roots(shared) else None

    # Paths of the store's files

    def image(self, digest: str, compression: str) -> Path:
        return self.folder / "images" / f"{digest.partition(':')[2]}.{compression}.sqsh"

    def blob(self, digest: str) -> Path:
        return self.folder / "blobs" / digest.partition(":")[2]

    def _tag(self, name: str, arch: str) -> Path:
        return self.folder / "tags" / f"{hashlib.sha256(f'{name} {arch}'.encode()).hexdigest()[:32]}.json"

    def _written(self, path: Path) -> Path:
        return self.folder / "files" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"

    # Locks of the store

    def turn(self, what: str, on_wait: Callable[[], None]) -> AbstractContextManager[None]:
        """Hold the lock for `what`. If several processes need the same image, one makes it and the others wait."""
        return in_turn(self.folder / "locks" / hashlib.sha256(what.encode()).hexdigest()[:32], on_wait)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep `sweep` from removing anything during the `with` block."""
        self._make_folders()
        with in_turn(self.folder / "locks" / "sweep", shared=True):
            yield

    def _make_folders(self) -> None:
        """Create all folders, writable only by this user.

        Other users run images that root stores, so only the owner may put files there. A link in place of a folder
        could make `sweep` remove other files.
        """
        if os.geteuid() == 0 and (part := part_of_others(self.folder, trusted_owners())):
            raise DalsegnoError(
                f"root stores no images in {self.folder}: other users can change {part}",
                hint=f"`chown root {part}` and `chmod go-w {part}`, or name another folder: DALSEGNO_IMAGES, or "
                "`containers.folder` in the cluster file",
            )
        for name in _FOLDERS:
            make_own_folder(self.folder / name, _ELSEWHERE)

    # Lookups of stored images

    def get(self, digest: str, compression: str) -> Stored | None:
        path = self.image(digest, compression)
        record = self._record(path.with_suffix(".json"))
        if record and is_ours(path, self._owners) and path.stat().st_size == record.size:
            return Stored(record, path)
        return self.shared.get(digest, compression) if self.shared else None

    def lookup(self, name: str, arch: str, compression: str, since: float) -> Stored | None:
        """Return the image that a name refers to; None if the name was not looked up since then, or if the image is not
        stored."""
        tag = self._read_tag(self._tag(name, arch))
        if tag is None or tag.seen < since or tag.compression != compression:
            return self.shared.lookup(name, arch, compression, since) if self.shared else None
        return self.get(tag.digest, compression)

    def all(self) -> list[Stored]:
        """Return every image, the newest first, including the images in root's store."""
        tags = self._tags()
        found = []
        for path in (self.folder / "images").glob("*.json"):
            record = self._record(path)
            if record:
                named = [t.name for t in tags if (t.digest, t.compression) == (record.digest, record.compression)]
                found.append(Stored(record, path.with_suffix(".sqsh"), tuple(sorted(set(named)))))
        found += self.shared.all() if self.shared else []
        return sorted(found, key=lambda each: -each.record.imported)

    def find(self, text: str) -> Stored:
        """Return an image by its name, by its path in the store, or by a unique prefix of its digest."""
        images = self.all()
        hits = [each for each in images if str(each.path) == text]
        with contextlib.suppress(UsageError):
            wanted = str(parse_name(text).absolute())
            hits = hits or [each for each in images if wanted in each.names or text in each.names]
        prefix = _PREFIX.fullmatch(text)
        hits = hits or [each for each in images if prefix and each.record.hex.startswith(prefix[1])]
        if len({each.record.digest for each in hits}) > 1:
            raise UsageError(f"`{text}` is the prefix of {len(hits)} images' digests", hint="write more digits")
        if hits:
            return hits[0]
        names = [name for each in images for name in each.names]
        raise NotThere(
            f"no image `{text}` in the store", hint=did_you_mean(text, names, "`dalsegno image ls` lists them")
        )

    def written(self, path: Path) -> WrittenImage | None:
        """Return the record of a file that was written outside the store."""
        return read_written(self._written(path))

    def find_name_of(self, sha256: str) -> str:
        """Return the name of a stored image or written file with this SHA-256; "" if there is none."""
        kept = [(each.record.sha256, (*each.names, each.record.hex[:12])[0]) for each in self.all()]
        written = [(each.sha256, each.name) for each in self._all_written()]
        return dict([*written, *kept]).get(sha256, "")

    def _all_written(self) -> list[WrittenImage]:
        return [each for path in (self.folder / "files").glob("*.json") if (each := read_written(path))]

    def _tags(self) -> list[Tag]:
        return [tag for path in (self.folder / "tags").glob("*.json") if (tag := self._read_tag(path))]

    def _record(self, path: Path) -> ImageRecord | None:
        return read_record(path) if is_ours(path, self._owners) else None

    def _read_tag(self, path: Path) -> Tag | None:
        return read_tag(path) if is_ours(path, self._owners) else None

    # Changes to the store

    def put(self, record: ImageRecord) -> Stored:
        """Write the record of an image. The image's file must exist already."""
        path = self.image(record.digest, record.compression)
        write(path.with_suffix(".json"), record)
        return Stored(record, path)

    def name(self, name: str, arch: str, record: ImageRecord) -> None:
        write(self._tag(name, arch), Tag(name, record.digest, record.compression, arch, self.clock()))

    def record_file(self, path: Path, name: str, sha256: str) -> None:
        """Write the record of a file outside the store. Errors are ignored, because the file works without a record."""
        with contextlib.suppress(DalsegnoError):
            self._make_folders()
            write(self._written(path), WrittenImage(str(path), name, sha256))

    def remove(self, stored: Stored) -> None:
        """Remove an image. Jobs that have it mounted can still use it."""
        if self.folder not in stored.path.parents:
            raise UsageError(f"{stored.path} belongs to root", hint="`sudo dalsegno image rm` removes it for all users")
        self._make_folders()
        stored.path.with_suffix(".json").unlink(missing_ok=True)
        stored.path.unlink(missing_ok=True)
        self._untag(lambda tag: _is_of(tag, stored))

    def remove_name(self, text: str, stored: Stored) -> tuple[str, ...]:
        """Remove the name `text` of an image that has other names, and return the other names.

        If `text` is the only name, or if it is not a name of the image, remove nothing and return ().
        """
        with contextlib.suppress(UsageError):
            wanted = {text, str(parse_name(text).absolute())}
            left = tuple(name for name in stored.names if name not in wanted)
            if left and left != stored.names and self.folder in stored.path.parents:
                self._untag(lambda tag: tag.name in wanted and _is_of(tag, stored))
                return left
        return ()

    def _untag(self, wanted: Callable[[Tag], bool]) -> None:
        self._make_folders()
        for path in (self.folder / "tags").glob("*.json"):
            tag = read_tag(path)
            if tag and wanted(tag):
                path.unlink(missing_ok=True)

    def sweep(self, layers: bool = False) -> RemovedFiles:
        """Remove images without a name, layers that no image uses (with `layers`, all layers), and incomplete files."""
        self._make_folders()
        try:
            with locked(self.folder / "locks" / "sweep", "the images"):
                return self._sweep(layers)
        except DalsegnoError as error:
            raise DalsegnoError("an image is being imported", hint="wait until it is done, then try again") from error

    def _sweep(self, layers: bool) -> RemovedFiles:
        kept = [each for each in self.all() if each.names and self.folder in each.path.parents]
        needed = set() if layers else {digest.partition(":")[2] for each in kept for digest in each.record.layers}
        wanted = {path for each in kept for path in (each.path, each.path.with_suffix(".json"))}
        stale = [path for path in (self.folder / "images").glob("*") if path not in wanted]
        stale += [path for path in (self.folder / "blobs").glob("*") if path.name not in needed]
        stale += [path for path in (self.folder / "locks").glob("*") if path.name != "sweep"]
        images = {each.record.digest for each in kept}
        for path in (self.folder / "tags").glob("*"):
            tag = read_tag(path)
            stale += [path] if tag is None or tag.digest not in images else []
        for path in (self.folder / "files").glob("*"):
            written = read_written(path)
            stale += [path] if written is None or not os.path.exists(written.path) else []
        return _remove(stale)


def _is_of(tag: Tag, stored: Stored) -> bool:
    return (tag.digest, tag.compression) == (stored.record.digest, stored.record.compression)


def open_store(wanted: Path, own: Path) -> ImageStore:
    """Return the store in the folder `wanted` if this user owns the folder or can create it.

    Otherwise this user's images are stored in a subfolder of `wanted` if `wanted` is writable, or else in `own`. The
    images in `wanted` are then only read, and only if nobody but root can write there.
    """
    try:
        return _open_store(wanted, own)
    except PermissionError as error:  # with protected_symlinks, the kernel refuses some links even to root
        raise explain(error, wanted) from error


def _open_store(wanted: Path, own: Path) -> ImageStore:
    if wanted.exists() and not wanted.is_dir():
        raise UsageError(
            f"{wanted} is not a folder: images cannot be stored there", hint="set DALSEGNO_IMAGES to a folder"
        )
    if _may_make(wanted) and (not wanted.exists() or wanted.stat().st_uid == os.geteuid()):
        return ImageStore(wanted)
    if wanted.is_dir() and os.access(wanted, os.W_OK):
        return ImageStore(wanted / f"of-{os.geteuid()}", wanted)
    return ImageStore(own, wanted)


def _may_make(folder: Path) -> bool:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return os.access(there, os.W_OK)


def _is_roots(folder: Path) -> bool:
    """Return whether only root can write to the images and tags in this folder. Images from other users could contain
    any program."""
    parts = [folder / name for name in ("images", "tags")]
    return all(_is_closed(part) and not part_of_others(part, {0}) for part in parts)


def _is_closed(folder: Path) -> bool:
    try:
        return not folder.stat().st_mode & 0o022
    except OSError:
        return False


def _remove(paths: list[Path]) -> RemovedFiles:
    files = size = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            length = path.stat().st_size
            path.unlink()
            files += length > 0
            size += length
    return RemovedFiles(files, size)


class ImportProgress(Protocol):
    """Receives the progress of an import, from several threads. A stage has `total` bytes, of which `here` are already
    done."""

    def stage(self, text: str, total: int = 0, here: int = 0) -> None: ...

    def advance(self, count: int) -> None: ...

    def warn(self, text: str) -> None: ...


class NoProgress:
    """Shows no progress."""

    def stage(self, text: str, total: int = 0, here: int = 0) -> None: ...

    def advance(self, count: int) -> None: ...

    def warn(self, text: str) -> None: ...
