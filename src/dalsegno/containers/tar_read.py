"""Reading a layer's tar in one pass: every header, with the place of its content in the stream.

Python's `tarfile` takes ten times as long a file; an image has a hundred thousand.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dalsegno.containers.damage import DamagedImage

BLOCK = 512
_ZEROS = bytes(BLOCK)
_MAX_HEADER = 1 << 20  # of pax records and long names: more is no header, but an attack
_MAX_NAME = 4096  # as the kernel takes
_MAX_EVERYWHERE = 1000
_MAX_ID = 0xFFFFFFFF
_FIELDS = struct.Struct("100s8s8s8s12s12s8s1s100s6s2s32s32s8s8s155s12x")
_XATTR = "SCHILY.xattr."


class Type(enum.Enum):
    FILE = "0"
    LINK = "1"  # a hard link
    SYMLINK = "2"
    DEVICE = "3"
    FOLDER = "5"
    FIFO = "6"


_TYPES = {b"0": Type.FILE, b"\0": Type.FILE, b"7": Type.FILE, b"1": Type.LINK, b"2": Type.SYMLINK, b"3": Type.DEVICE,
          b"4": Type.DEVICE, b"5": Type.FOLDER, b"6": Type.FIFO}  # fmt: skip


class Entry(NamedTuple):
    """One thing in a layer. `path` as the tar says it; `link`: what a link leads to."""

    path: str
    type: Type
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    size: int = 0
    offset: int = 0  # where its content begins in the unpacked stream
    link: str = ""
    xattrs: tuple[tuple[str, bytes], ...] = ()


class Stream:
    """Chunks of bytes, read in pieces of any length."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._chunk = memoryview(b"")
        self._at = 0
        self.offset = 0

    def read(self, size: int) -> bytes:
        """Just so many bytes, or fewer at the end."""
        if self._at + size <= len(self._chunk):
            found = bytes(self._chunk[self._at : self._at + size])
            self._at += size
            self.offset += size
            return found
        return b"".join(self.pieces(size))

    def pieces(self, size: int) -> Iterator[memoryview]:
        """The next `size` bytes as they come, without copying them."""
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
        """False if the stream ended before."""
        wanted = self.offset + size
        for _ in self.pieces(size):
            pass
        return self.offset == wanted

    def drain(self) -> None:
        """To the end, for the checksum's sake."""
        self.offset += len(self._chunk) - self._at
        self._at = len(self._chunk)
        for chunk in self._chunks:
            self.offset += len(chunk)


def read_entries(stream: Stream) -> Iterator[Entry]:
    """All of a layer, in its order. Zeros at its end may be missing, those of its last file too: umoci 0.4 does so."""
    everywhere: dict[str, bytes] = {}  # pax records that hold for all that follow
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
            content = entry.size if entry.type is Type.FILE else 0
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
        elif kind == b"V":  # a volume's label
            stream.skip(_padded(size))
        else:
            raise DamagedImage(f"a layer has an entry of a kind that is not known: {kind!r}")


def _parse(header: bytes, records: dict[str, bytes]) -> tuple[Entry, bytes, int]:
    if len(header) < BLOCK:
        raise DamagedImage("a layer ends in the middle of a header")
    name, mode, uid, gid, size, mtime, check, kind, link, magic, *_, prefix = _FIELDS.unpack(header)
    if sum(header) - sum(check) + 8 * 32 != _number(check):
        raise DamagedImage("a layer is no tar file, or is damaged: the checksum of a header is wrong")
    path = name.partition(b"\0")[0]
    if magic == b"ustar\0" and prefix[0]:
        path = prefix.partition(b"\0")[0] + b"/" + path
    entry_type = _TYPES.get(kind, Type.FILE)
    if entry_type is Type.FILE and kind == b"\0" and path.endswith(b"/"):
        entry_type = Type.FOLDER  # how it was written before 1988
    entry = Entry(
        _text(path), entry_type, _number(mode) & 0o7777, _number(uid), _number(gid), _time(_number(mtime)),
        _number(size), 0, _text(link.partition(b"\0")[0]),
    )  # fmt: skip
    if records and kind in _TYPES:
        entry = _with_records(entry, records)
    if len(entry.path) > _MAX_NAME or len(entry.link) > _MAX_NAME:
        raise DamagedImage(f"a layer has a name of more than {_MAX_NAME} characters: `{entry.path[:60]}…`")
    if not (0 <= entry.uid <= _MAX_ID and 0 <= entry.gid <= _MAX_ID):
        raise DamagedImage(f"the owner of `{entry.path}` in a layer is no user's number")
    return entry, kind, entry.size


def _with_records(entry: Entry, records: dict[str, bytes]) -> Entry:
    if any(key.startswith("GNU.sparse.") for key in records):
        raise DamagedImage("a layer has a sparse file, which no registry's tool writes")
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
    """Records of the form `LENGTH KEY=VALUE\\n`, LENGTH counting all of it."""
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
    if field[0] & 0x80:  # GNU's way for numbers that eleven digits cannot hold
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
    """As squashfs can hold it."""
    return min(max(seconds, 0), 0xFFFFFFFF)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
