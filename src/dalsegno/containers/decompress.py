"""A blob's bytes, and what they are unpacked: gzip, zstd or neither, told by their first bytes."""

from __future__ import annotations

import itertools
import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dalsegno.containers.damage import DamagedImage
from dalsegno.errors import CommandFailed
from dalsegno.system.machine import program
from dalsegno.system.pipes import through

CHUNK = 1 << 20
_MOST_AT_ONCE = 4 << 20  # whatever a chunk unpacks to
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = 0x184D2A50  # and the fifteen numbers after it
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz"}


@dataclass(frozen=True)
class Blob:
    """Bytes on disk: a file, or a part of one."""

    path: Path
    offset: int = 0
    size: int = -1  # to the end
    digest: str = ""  # that they must have; "": it was checked, or is not known
    private: bool = False  # nobody else can change them between two looks

    def raw(self) -> Iterator[bytes]:
        """All of it, in chunks. Only of a regular file: whoever opens a pipe may wait for ever."""
        with open(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DamagedImage(f"{self.path} is not a regular file")
            file.seek(self.offset)
            left = self.size
            while left and (chunk := file.read(CHUNK if left < 0 else min(CHUNK, left))):
                left -= len(chunk) if left > 0 else 0
                yield chunk

    def read(self, most: int) -> bytes:
        """All of it, if it is not longer than this."""
        data = bytearray()
        for chunk in self.raw():
            data += chunk
            if len(data) > most:
                raise DamagedImage(f"{self.path} is longer than {most} bytes, and should be a small file")
        return bytes(data)


def unpacked(raw: Iterator[bytes]) -> Iterator[bytes]:
    """The tar inside."""
    first = next(raw, b"")
    whole = itertools.chain([first], raw)
    if first.startswith(_GZIP):
        return _gunzip(whole)
    if first.startswith(_ZSTD) or int.from_bytes(first[:4], "little") & 0xFFFFFFF0 == _ZSTD_SKIPPABLE:
        return _unzstd(whole)
    for magic, name in _OTHERS.items():
        if first.startswith(magic):
            raise DamagedImage(f"a layer is packed with {name}, which images are not", hint="pack it with gzip or zstd")
    return whole


def _gunzip(raw: Iterator[bytes]) -> Iterator[bytes]:
    """One member or many, as tools write them that pack in parallel."""
    engine = zlib.decompressobj(31)
    try:
        for chunk in raw:
            left = chunk
            while left:
                if engine.eof:
                    left = left.lstrip(b"\0")
                    if not left:
                        break
                    engine = zlib.decompressobj(31)
                piece = engine.decompress(left, _MOST_AT_ONCE)
                left = engine.unused_data if engine.eof else engine.unconsumed_tail
                if piece:
                    yield piece
    except zlib.error as error:
        raise DamagedImage(f"a layer cannot be unpacked: {error}") from None
    if not engine.eof:
        raise DamagedImage("a layer cannot be unpacked: it ends too early")


def _unzstd(raw: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from through([program("zstd") or "zstd", "-dcq"], raw)
    except CommandFailed as error:
        raise DamagedImage(f"a layer cannot be unpacked: {error.stderr.strip()}") from None
