"""Read and write tar streams, and decompress layers.

A layer is read in one pass. Python's `tarfile` takes ten times as long for each file, and an image may have 100,000
files.
"""

from __future__ import annotations

import enum
import itertools
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dalsegno.containers.manifest import DamagedImage
from dalsegno.errors import CommandFailed
from dalsegno.system.machine import program
from dalsegno.system.processes import through

BLOCK = 512
_ZEROS = bytes(BLOCK)
_MAX_HEADER = 1 << 20  # maximum bytes of pax records and long names; a longer header is refused as an attack
_MAX_NAME = 4096  # the kernel's limit for the length of a path
_MAX_EVERYWHERE = 1000
_MAX_ID = 0xFFFFFFFF
_FIELDS = struct.Struct("100s8s8s8s12s12s8s1s100s6s2s32s32s8s8s155s12x")
_XATTR = "SCHILY.xattr."


class TarType(enum.Enum):
    FILE = "0"
    LINK = "1"  # a hard link
    SYMLINK = "2"
    DEVICE = "3"
    FOLDER = "5"
    FIFO = "6"


_TYPES = {
    **dict.fromkeys((b"0", b"\0", b"7"), TarType.FILE),
    b"1": TarType.LINK,
    b"2": TarType.SYMLINK,
    **dict.fromkeys((b"3", b"4"), TarType.DEVICE),
    b"5": TarType.FOLDER,
    b"6": TarType.FIFO,
}


class TarEntry(NamedTuple):
    """One entry of a layer. `path` is as in the tar file; `link` is the target of a link."""

    path: str
    type: TarType
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    size: int = 0
    offset: int = 0  # where the content begins in the unpacked stream
    link: str = ""
    xattrs: tuple[tuple[str, bytes], ...] = ()


class Stream:
    """A stream of byte chunks that can be read in pieces of any length."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._chunk = memoryview(b"")
        self._at = 0
        self.offset = 0

    def read(self, size: int) -> bytes:
        """Return exactly `size` bytes, or fewer at the end."""
        if self._at + size <= len(self._chunk):
            found = bytes(self._chunk[self._at : self._at + size])
            self._at += size
            self.offset += size
            return found
        return b"".join(self.pieces(size))

    def pieces(self, size: int) -> Iterator[memoryview]:
        """Yield the next `size` bytes as they come, without copying them."""
        while size:
            if self._at == len(self._chunk):
                chunk = next(self._chunks, None)
                if chunk is None:
                    return
                self._chunk, self._at = memoryview(chunk), 0
                continue
            piece = self._chunk[self._at : self._at + size]
            self._at += len(piece)
            self.offset += len(piece)
            size -= len(piece)
            yield piece

    def skip(self, size: int) -> bool:
        """Skip `size` bytes; return False if the stream ends earlier."""
        wanted = self.offset + size
        for _ in self.pieces(size):
            pass
        return self.offset == wanted

    def drain(self) -> None:
        """Read to the end, so that the checksum covers all bytes."""
        self.offset += len(self._chunk) - self._at
        self._at = len(self._chunk)
        for chunk in self._chunks:
            self.offset += len(chunk)


def read_entries(stream: Stream) -> Iterator[TarEntry]:
    """Yield all entries of a layer, in order. The zero blocks at the end, and even the last file's padding, may be
    missing, as in layers that umoci 0.4 writes."""
    everywhere: dict[str, bytes] = {}  # pax records that apply to all following entries
    records: dict[str, bytes] = {}
    while True:
        header = stream.read(BLOCK)
        if not header or header == _ZEROS:
            if records:
                raise DamagedImage("a layer ends in the middle of a header")
            stream.drain()
            return
        entry, kind, size = _parse(header, {**everywhere, **records} if everywhere else records)
        if kind in _TYPES:
            entry = entry._replace(offset=stream.offset)
            content = entry.size if entry.type is TarType.FILE else 0
            yield entry
            records = {}
            if not stream.skip(_padded(content)) and stream.offset < entry.offset + content:
                raise DamagedImage(f"a layer ends in the middle of `{entry.path}`")
        elif kind == b"g":
            everywhere.update(_pax(_content(stream, size)))
            if len(everywhere) > _MAX_EVERYWHERE:
                raise DamagedImage("a layer has too many global headers")
        elif kind == b"x":
            records.update(_pax(_content(stream, size)))
        elif kind in (b"L", b"K"):
            records["path" if kind == b"L" else "linkpath"] = _content(stream, size).rstrip(b"\0")
        elif kind == b"V":  # a volume label, which is ignored
            stream.skip(_padded(size))
        else:
            raise DamagedImage(f"a layer has an entry of unknown type {kind!r}")


def _parse(header: bytes, records: dict[str, bytes]) -> tuple[TarEntry, bytes, int]:
    if len(header) < BLOCK:
        raise DamagedImage("a layer ends in the middle of a header")
    name, mode, uid, gid, size, mtime, check, kind, link, magic, *_, prefix = _FIELDS.unpack(header)
    if sum(header) - sum(check) + 8 * 32 != _number(check):
        raise DamagedImage("a layer is not a tar file, or is damaged: a header has a wrong checksum")
    path = name.partition(b"\0")[0]
    if magic == b"ustar\0" and prefix[0]:
        path = prefix.partition(b"\0")[0] + b"/" + path
    entry_type = _TYPES.get(kind, TarType.FILE)
    if entry_type is TarType.FILE and kind == b"\0" and path.endswith(b"/"):
        entry_type = TarType.FOLDER  # archives from before 1988 mark a folder only by a final slash
    entry = TarEntry(
        _text(path), entry_type, _number(mode) & 0o7777, _number(uid), _number(gid), _time(_number(mtime)),
        _number(size), 0, _text(link.partition(b"\0")[0]),
    )  # fmt: skip
    if records and kind in _TYPES:
        entry = _with_records(entry, records)
    if len(entry.path) > _MAX_NAME or len(entry.link) > _MAX_NAME:
        raise DamagedImage(f"a layer has a name of more than {_MAX_NAME} characters: `{entry.path[:60]}…`")
    if not (0 <= entry.uid <= _MAX_ID and 0 <= entry.gid <= _MAX_ID):
        raise DamagedImage(f"the owner of `{entry.path}` in a layer is not a valid user id")
    return entry, kind, entry.size


def _with_records(entry: TarEntry, records: dict[str, bytes]) -> TarEntry:
    if any(key.startswith("GNU.sparse.") for key in records):
        raise DamagedImage("a layer has a sparse file, which is not supported")
    try:
        return entry._replace(
            path=_text(records.get("path", b"")) or entry.path,
            link=_text(records.get("linkpath", b"")) or entry.link,
            size=int(records.get("size", entry.size)),
            uid=int(records.get("uid", entry.uid)),
            gid=int(records.get("gid", entry.gid)),
            mtime=_time(int(float(records.get("mtime", entry.mtime)))),
            xattrs=tuple((k.removeprefix(_XATTR), v) for k, v in records.items() if k.startswith(_XATTR)),
        )
    except (ValueError, OverflowError):
        raise DamagedImage(f"the header of `{entry.path}` in a layer cannot be read") from None


def _pax(data: bytes) -> dict[str, bytes]:
    """Parse records of the form `LENGTH KEY=VALUE\\n`, where LENGTH counts the whole record."""
    found: dict[str, bytes] = {}
    at = 0
    while at < len(data) and data[at]:
        length, space, _ = data[at : at + 20].partition(b" ")
        end = at + int(length) if space and length.isdigit() else 0
        key, equals, value = data[at + len(length) + 1 : end].partition(b"=")
        if not equals or not value.endswith(b"\n"):
            raise DamagedImage("a header in a layer cannot be read")
        found[_text(key)] = value[:-1]
        at = end
    return found


def _content(stream: Stream, size: int) -> bytes:
    if size > _MAX_HEADER:
        raise DamagedImage(f"a header in a layer is longer than {_MAX_HEADER >> 20} MiB")
    data = stream.read(_padded(size))
    if len(data) < _padded(size):
        raise DamagedImage("a layer ends in the middle of a header")
    return data[:size]


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU's binary format, for numbers with too many octal digits for the field
        value = int.from_bytes(field, "big", signed=True) if field[0] == 0xFF else int.from_bytes(field[1:], "big")
        return value + ((field[0] & 0x7F) << (8 * (len(field) - 1)) if field[0] != 0xFF else 0)
    text = field.partition(b"\0")[0].strip()
    try:
        return int(text, 8) if text else 0
    except ValueError:
        raise DamagedImage("a number in a layer's header cannot be read") from None


def _padded(size: int) -> int:
    if size < 0:
        raise DamagedImage("a size in a layer's header is negative")
    return -(-size // BLOCK) * BLOCK


def _time(seconds: int) -> int:
    """Return the time, clamped to the range that squashfs can store."""
    return min(max(seconds, 0), 0xFFFFFFFF)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


# Writing of archives


_PAX = b"x"
END = bytes(2 * BLOCK)


def header(entry: TarEntry, path: str, link: str = "") -> bytes:
    """Return the header of `entry` under the name `path`. A pax header comes first if a field does not fit the old
    format."""
    name = _bytes(path + ("/" if entry.type is TarType.FOLDER else ""))
    target = _bytes(link)
    size = entry.size if entry.type is TarType.FILE else 0
    records: list[tuple[str, bytes]] = [(f"SCHILY.xattr.{key}", value) for key, value in entry.xattrs]
    if len(name) > 100:
        records.append(("path", name))
    if len(target) > 100:
        records.append(("linkpath", target))
    for key, value, most in (("size", size, 8**11), ("uid", entry.uid, 8**7), ("gid", entry.gid, 8**7)):
        if value >= most:
            records.append((key, str(value).encode()))
    before = _pax_header(records) if records else b""
    return before + _block(name, entry, entry.type.value.encode(), size, target)


def hard_link(entry: TarEntry, path: str, first: str) -> bytes:
    """Return the header that makes `path` another name of the file `first` in the stream."""
    return header(entry._replace(type=TarType.LINK, size=0, xattrs=()), path, first)


def padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


def _block(name: bytes, entry: TarEntry, kind: bytes, size: int, link: bytes) -> bytes:
    block = b"%b%07o\0%07o\0%07o\0%011o\0%011o\0        %b%bustar\00000" % (
        name[:100].ljust(100, b"\0"), entry.mode, entry.uid % 8**7, entry.gid % 8**7, size % 8**11, entry.mtime,
        kind, link[:100].ljust(100, b"\0"),
    )  # fmt: skip
    return b"%b%06o\0 %b" % (block[:148], sum(block), block[156:].ljust(BLOCK - 156, b"\0"))


def _pax_header(records: list[tuple[str, bytes]]) -> bytes:
    data = b"".join(_record(key, value) for key, value in records)
    about = TarEntry("", TarType.FILE, mode=0o644)
    return _block(b"./PaxHeaders/x", about, _PAX, len(data), b"") + data + padding(len(data))


def _record(key: str, value: bytes) -> bytes:
    rest = b" " + _bytes(key) + b"=" + value + b"\n"
    length = len(rest) + len(str(len(rest)))
    length = len(rest) + len(str(length))  # the length includes its own digits
    return str(length).encode() + rest


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


# Decompression: gzip, zstd or neither, by the first bytes


CHUNK = 1 << 20
_MAX_CHUNK = 4 << 20  # at most this many bytes are decompressed at a time
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = 0x184D2A50  # the first of sixteen magic numbers for skippable frames
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz"}


@dataclass(frozen=True)
class FileSlice:
    """Bytes on disk: a file, or a part of one."""

    path: Path
    offset: int = 0
    size: int = -1  # number of bytes; -1 means up to the end of the file
    digest: str = ""  # expected digest; "" if it was checked or is unknown
    private: bool = False  # whether only this user can change the bytes between two reads

    def raw(self) -> Iterator[bytes]:
        """Yield all bytes in chunks. Only a regular file is read, because opening a pipe could block forever."""
        with open(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DamagedImage(f"{self.path} is not a regular file")
            file.seek(self.offset)
            left = self.size
            while left and (chunk := file.read(CHUNK if left < 0 else min(CHUNK, left))):
                left -= len(chunk) if left > 0 else 0
                yield chunk

    def read(self, most: int) -> bytes:
        """Return all bytes; raise DamagedImage if there are more than `most`."""
        data = bytearray()
        for chunk in self.raw():
            data += chunk
            if len(data) > most:
                raise DamagedImage(f"{self.path} is longer than {most} bytes")
        return bytes(data)


def unpacked(raw: Iterator[bytes]) -> Iterator[bytes]:
    """Return the bytes, decompressed if they are in gzip's or zstd's format."""
    first = next(raw, b"")
    whole = itertools.chain([first], raw)
    if first.startswith(_GZIP):
        return _gunzip(whole)
    if first.startswith(_ZSTD) or int.from_bytes(first[:4], "little") & 0xFFFFFFF0 == _ZSTD_SKIPPABLE:
        return _unzstd(whole)
    for magic, name in _OTHERS.items():
        if first.startswith(magic):
            raise DamagedImage(
                f"a layer is packed with {name}, which is not supported", hint="pack it with gzip or zstd"
            )
    return whole


def _gunzip(raw: Iterator[bytes]) -> Iterator[bytes]:
    """Decompress one gzip member or several; parallel compressors write several."""
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
                piece = engine.decompress(left, _MAX_CHUNK)
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
