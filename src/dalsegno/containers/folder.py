"""Files of this machine as a layer, and a .sqsh of them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from dalsegno.containers import metadata
from dalsegno.containers.decompress import CHUNK
from dalsegno.containers.manifest import Config
from dalsegno.containers.merge import merge
from dalsegno.containers.progress import Progress
from dalsegno.containers.squash import squash, stream_size, tar_stream
from dalsegno.containers.tar_read import Entry, Type
from dalsegno.errors import DalsegnoError, NotThere
from dalsegno.system.files import nameless
from dalsegno.system.ownership import folder_beneath

_TYPES = {stat.S_IFREG: Type.FILE, stat.S_IFDIR: Type.FOLDER, stat.S_IFLNK: Type.SYMLINK, stat.S_IFIFO: Type.FIFO}


class Source(NamedTuple):
    """A file whose content belongs to a layer, as it was when it was looked at."""

    path: Path
    size: int
    inode: tuple[int, int]
    below: Path  # no link on the way from there to it was followed


@dataclass
class Layer:
    """Entries whose content are files here, one behind the other as in one stream."""

    own_owners: bool  # keep who owns what; else all is root's
    entries: list[Entry] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    _offset: int = 0
    _seen: dict[tuple[int, int], str] = field(default_factory=dict)

    def add(self, source: Path, path: str, below: Path | None = None) -> None:
        """One thing, not what is in it. Sockets and devices are left out. `below`: the folder that all of is added."""
        try:
            found = source.lstat()
            link = os.readlink(source) if stat.S_ISLNK(found.st_mode) else ""
        except OSError as error:
            raise _unreadable(source, error) from error
        kind = _TYPES.get(stat.S_IFMT(found.st_mode))
        if kind is None:
            return
        uid, gid = (found.st_uid, found.st_gid) if self.own_owners else (0, 0)
        mtime = min(max(int(found.st_mtime), 0), 0xFFFFFFFF)
        entry = Entry(path, kind, stat.S_IMODE(found.st_mode), uid, gid, mtime, link=link)
        if kind is Type.FILE:
            entry = self._file(entry, source, found, below or source.parent)
        self.entries.append(entry)

    def _file(self, entry: Entry, source: Path, found: os.stat_result, below: Path) -> Entry:
        inode = (found.st_dev, found.st_ino)
        if found.st_nlink > 1 and inode in self._seen:
            return entry._replace(type=Type.LINK, link=self._seen[inode])
        self._seen[inode] = entry.path
        self.sources.append(Source(source, found.st_size, inode, below))
        placed = entry._replace(size=found.st_size, offset=self._offset)
        self._offset += found.st_size
        return placed

    def add_tree(self, source: Path, path: str, leave_out: Iterable[str] = ()) -> None:
        """A folder and all in it; `leave_out`: folders' names, or patterns of them."""
        skipped = tuple(leave_out)
        for folder, folders, files in os.walk(source, onerror=_raise):
            inside = os.path.relpath(folder, source)
            here = path if inside == "." else f"{path}/{inside}".lstrip("/")
            folders[:] = sorted(name for name in folders if not any(fnmatch(name, each) for each in skipped))
            if here:
                self.add(Path(folder), here, source)
            for name in sorted([*files, *(each for each in folders if os.path.islink(f"{folder}/{each}"))]):
                self.add(Path(folder, name), f"{here}/{name}".lstrip("/"), source)

    def chunks(self) -> Iterator[bytes]:
        with contextlib.closing(_Opener()) as opener:
            for source in self.sources:
                yield from _content(opener, source)


def _content(opener: _Opener, source: Source) -> Iterator[bytes]:
    size = source.size
    try:
        with opener.open(source) as file:
            while size and (chunk := file.read(min(CHUNK, size))):
                size -= len(chunk)
                yield chunk
    except OSError as error:
        raise _unreadable(source.path, error) from error
    if size:
        raise _changed(source.path)


class _Opener:
    """Opens the very files that were looked at: root must not be led to others, which only root can read. The folder of
    the last one stays open, for most of the next are in it."""

    def __init__(self) -> None:
        self._at: tuple[Path, str] | None = None
        self._folder = -1

    def open(self, source: Source) -> io.FileIO:
        folder, name = os.path.split(source.path)
        if self._at != (source.below, folder):
            self.close()
            self._folder = folder_beneath(source.below, folder.removeprefix(str(source.below)).lstrip("/"))
            self._at = (source.below, folder)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = open(os.open(name, flags, dir_fd=self._folder), "rb", buffering=0)  # noqa: SIM115 - the caller's
        about = os.fstat(file.fileno())
        if (about.st_dev, about.st_ino) != source.inode:
            file.close()
            raise _changed(source.path)
        return file

    def close(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
        self._at, self._folder = None, -1


def _changed(path: Path) -> DalsegnoError:
    return DalsegnoError(f"{path} changed while it was read", hint="try again when nobody writes there")


def layer_of(folder: Path) -> Layer:
    """A root file system that lies in a folder."""
    if not folder.is_dir():
        raise NotThere(f"no folder {folder}", hint="name a folder that holds what shall be the image's root")
    layer = Layer(own_owners=os.geteuid() == 0)
    layer.add_tree(folder, "")
    return layer


def pack(layer: Layer, config: Config, target: Path, compression: str, progress: Progress, own: bool = False) -> str:
    """Write the image; gives the digest of what went into it."""
    about, content = metadata.as_layer(config)
    merged = merge([layer.entries, about], folders=[metadata.workdir(config)])
    progress.stage("packing", stream_size(merged))
    digest = hashlib.sha256()

    def stream() -> Iterator[bytes | memoryview]:
        for piece in tar_stream(merged, [layer.chunks(), iter([content])], progress.advance):
            digest.update(piece)
            yield piece

    with nameless(target, own=own) as handle:
        squash(stream(), handle, compression)
    return f"sha256:{digest.hexdigest()}"


def _raise(error: OSError) -> None:
    raise _unreadable(Path(str(error.filename)), error)


def _unreadable(path: Path, error: OSError) -> DalsegnoError:
    return DalsegnoError(
        f"{path} cannot be read: {error.strerror}", hint="an image holds all of a folder; mend its rights"
    )
