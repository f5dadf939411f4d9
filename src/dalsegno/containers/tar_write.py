"""Writing the headers of the one tar stream that `sqfstar` reads."""

from __future__ import annotations

from dalsegno.containers.tar_read import BLOCK, Entry, Type

_PAX = b"x"
END = bytes(2 * BLOCK)


def header(entry: Entry, path: str, link: str = "") -> bytes:
    """The header of `entry` under the name `path`; what the old format cannot hold goes into a pax header before it."""
    name = _bytes(path + ("/" if entry.type is Type.FOLDER else ""))
    target = _bytes(link)
    size = entry.size if entry.type is Type.FILE else 0
    records: list[tuple[str, bytes]] = [(f"SCHILY.xattr.{key}", value) for key, value in entry.xattrs]
    if len(name) > 100:
        records.append(("path", name))
    if len(target) > 100:
        records.append(("linkpath", target))
    for key, value, most in (("size", size, 8**11), ("uid", entry.uid, 8**7), ("gid", entry.gid, 8**7)):
        if value >= most:
            records.append((key, str(value).encode()))
    before = _pax(records) if records else b""
    return before + _block(name, entry, entry.type.value.encode(), size, target)


def hard_link(entry: Entry, path: str, first: str) -> bytes:
    """Another name for the file that stands in the stream as `first`."""
    return header(entry._replace(type=Type.LINK, size=0, xattrs=()), path, first)


def padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


def _block(name: bytes, entry: Entry, kind: bytes, size: int, link: bytes) -> bytes:
    block = b"%b%07o\0%07o\0%07o\0%011o\0%011o\0        %b%bustar\00000" % (
        name[:100].ljust(100, b"\0"), entry.mode, entry.uid % 8**7, entry.gid % 8**7, size % 8**11, entry.mtime,
        kind, link[:100].ljust(100, b"\0"),
    )  # fmt: skip
    return b"%b%06o\0 %b" % (block[:148], sum(block), block[156:].ljust(BLOCK - 156, b"\0"))


def _pax(records: list[tuple[str, bytes]]) -> bytes:
    data = b"".join(_record(key, value) for key, value in records)
    about = Entry("", Type.FILE, mode=0o644)
    return _block(b"./PaxHeaders/x", about, _PAX, len(data), b"") + data + padding(len(data))


def _record(key: str, value: bytes) -> bytes:
    rest = b" " + _bytes(key) + b"=" + value + b"\n"
    length = len(rest) + len(str(len(rest)))
    length = len(rest) + len(str(length))  # its own digits count too
    return str(length).encode() + rest


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
