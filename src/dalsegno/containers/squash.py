"""Write merged layers as a .sqsh file: one tar stream into `sqfstar`, without an unpacked copy and without root."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path

from dalsegno.containers.manifest import DamagedImage
from dalsegno.containers.merge import Merged
from dalsegno.containers.tar import END, FileSlice, Stream, hard_link, header, padding, unpacked
from dalsegno.errors import CommandFailed, DalsegnoError, UsageError
from dalsegno.system.files import check_creatable
from dalsegno.system.machine import program
from dalsegno.system.processes import LocalRunner, Sink

COMPRESSIONS = ("lz4", "zstd", "gzip")
MEMORY_VARIABLE = "DALSEGNO_MEMORY_MIB"  # set by the container plugin (`native/start.c`)
_LEAST_MIB = 64
Advance = Callable[[int], None]  # called with the number of bytes done since the last call


def tar_stream(merged: Merged, layers: Sequence[Iterator[bytes]], advance: Advance) -> Iterator[bytes | memoryview]:
    """Yield the tar stream. `layers` are the unpacked bytes of each layer, which are read once."""
    for placed in merged.bare:
        yield header(placed.entry, placed.names[0], placed.entry.link)
    for files, chunks in zip(merged.files, layers, strict=True):
        if not files:
            continue
        stream = Stream(chunks)
        for placed in files:
            entry, (first, *others) = placed.entry, placed.names
            before = stream.offset
            stream.skip(entry.offset - stream.offset)
            yield header(entry, first)
            yield from stream.pieces(entry.size)
            if stream.offset != entry.offset + entry.size:
                raise DamagedImage("a layer changed while it was read")
            yield padding(entry.size)
            for other in others:
                yield hard_link(entry, other, first)
            advance(stream.offset - before)
        if isinstance(chunks, VerifiedReread):
            chunks.check()
    yield END


def stream_size(merged: Merged) -> int:
    """Return how many bytes `tar_stream` reads: each layer up to the end of the last file that the image uses."""
    return sum(files[-1].entry.offset + files[-1].entry.size for files in merged.files if files)


def squash(stream: Iterator[bytes | memoryview], handle: int, compression: str) -> None:
    """Have `sqfstar` write the stream into an open file."""
    tool = program("sqfstar")
    if tool is None:
        raise DalsegnoError(
            "`sqfstar` is not installed", hint="install squashfs-tools 4.5 or later, or run `./dalsegno setup`"
        )
    argv = [
        *_as_root(), tool, "-comp", compression, *memory_options(os.environ), "-root-mode", "0755", "-mkfs-time", "0",
        "-no-progress", "-quiet", "-exit-on-error", "-force", f"/proc/self/fd/{handle}",
    ]  # fmt: skip
    env = {key: value for key, value in os.environ.items() if key != "SOURCE_DATE_EPOCH"}  # conflicts with -mkfs-time
    try:
        with Sink(argv, env, keep=[handle]) as sink:
            for piece in stream:
                sink.write(piece)
    except CommandFailed as error:
        raise _explain(error) from error


def memory_options(env: Mapping[str, str]) -> list[str]:
    """Return options that limit sqfstar's queues to a quarter of the job's memory, if the import runs in a job.

    sqfstar's default is a quarter of the machine's memory.
    """
    memory_mib = env.get(MEMORY_VARIABLE, "")
    return ["-mem", f"{max(int(memory_mib) // 4, _LEAST_MIB)}M"] if memory_mib.isdecimal() else []


def _as_root() -> list[str]:
    """Return a prefix that runs sqfstar as root in a user namespace, if possible.

    Otherwise sqfstar 4.5 makes the calling user the owner of the image's root folder, whatever `-root-uid` says.
    """
    unshare = program("unshare")
    if os.geteuid() == 0 or unshare is None:
        return []
    prefix = [unshare, "--map-root-user"]
    return prefix if LocalRunner().run([*prefix, "true"]).exit_code == 0 else []


def _explain(error: CommandFailed) -> DalsegnoError:
    if "No space left" in error.stderr or "Disk quota" in error.stderr:
        return DalsegnoError(
            "no space left for the image",
            hint="free some space, name a file on another disk with `-o`, or set DALSEGNO_IMAGES",
        )
    return error


def check_target(target: Path, force: bool) -> None:
    """Raise if the file cannot be written. Call this before the image is made, so that no work is lost."""
    if target.is_dir():
        raise UsageError(f"{target} is a folder", hint=f"name a file in it: `-o {target}/IMAGE.sqsh`")
    if target.exists() and not force:
        raise UsageError(f"{target} already exists", hint="name another file, or use `--force`")
    if not target.parent.is_dir():
        raise UsageError(f"no folder {target.parent}", hint="create it, or name another file")
    check_creatable(target)


class VerifiedReread(Iterator[bytes]):
    """A layer's unpacked bytes, read a second time. The packed bytes must still have the digest that was checked.

    The file's owner could have changed the file since that check.
    """

    def __init__(self, blob: FileSlice) -> None:
        self._blob, self._digest = blob, hashlib.sha256()
        self._raw = self._read(blob.raw()) if blob.digest else blob.raw()
        self._chunks = unpacked(self._raw)

    def _read(self, raw: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in raw:
            self._digest.update(chunk)
            yield chunk

    def __next__(self) -> bytes:
        return next(self._chunks)

    def check(self) -> None:
        """Read the rest of the packed bytes. Raise DamagedImage if they do not have the expected digest."""
        if not self._blob.digest:
            return
        if isinstance(self._chunks, Generator):
            self._chunks.close()  # stops the decompressor
        for _ in self._raw:
            pass
        if f"sha256:{self._digest.hexdigest()}" != self._blob.digest:
            raise DamagedImage(f"a layer in {self._blob.path} changed while it was read", hint="try again")


def layer_chunks(blobs: Sequence[FileSlice]) -> list[Iterator[bytes]]:
    return [VerifiedReread(blob) for blob in blobs]
