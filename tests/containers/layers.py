"""Entries of layers for tests."""

from __future__ import annotations

from dalsegno.containers.tar import TarEntry, TarType


def file(path: str, text: str = "", **rest: int) -> TarEntry:
    """Return a file whose content is identified by its offset, as in a real layer."""
    return TarEntry(path, TarType.FILE, mode=rest.get("mode", 0o644), size=len(text), offset=rest.get("offset", 0))


def folder(path: str, mode: int = 0o755) -> TarEntry:
    return TarEntry(path, TarType.FOLDER, mode=mode)


def symlink(path: str, to: str) -> TarEntry:
    return TarEntry(path, TarType.SYMLINK, mode=0o777, link=to)


def link(path: str, to: str) -> TarEntry:
    return TarEntry(path, TarType.LINK, link=to)


def device(path: str) -> TarEntry:
    return TarEntry(path, TarType.DEVICE)
