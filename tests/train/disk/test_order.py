"""The state after a power failure, derived from the order of the system calls.

A kill cannot show a missing fsync, because the page cache survives it. So the test records the calls of a real save.
Data that was not fsynced when a name changes may be lost while the name stays.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from dalsegno.train.disk.format import step_name
from tests.train.disk.states import filled, save

pytestmark = pytest.mark.cluster  # it records real system calls, which unit tests do not make


class Disk:
    """A record of the files and folders whose contents are not yet on disk."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.unsynced: set[Path] = set()
        self.renames: list[tuple[Path, Path, set[Path]]] = []
        self.linked: list[tuple[str, set[Path]]] = []
        self._open: dict[int, Path] = {}
        self._real = {
            name: getattr(os, name)
            for name in ("open", "write", "fsync", "replace", "rename", "unlink", "symlink", "mkdir")
        }
        for name in self._real:
            patch.setattr(os, name, getattr(self, name))

    def open(self, path: Any, flags: int, *more: Any, **named: Any) -> int:
        fd: int = self._real["open"](path, flags, *more, **named)
        self._open[fd] = Path(path)
        if flags & os.O_CREAT:
            self.unsynced |= {Path(path), Path(path).parent}
        return fd

    def write(self, fd: int, data: Any) -> int:
        if fd in self._open:
            self.unsynced.add(self._open[fd])
        written: int = self._real["write"](fd, data)
        return written

    def fsync(self, fd: int) -> None:
        self._real["fsync"](fd)
        self.unsynced.discard(self._open[fd])

    def _rename(self, name: str, old: Any, new: Any) -> None:
        self.renames.append((Path(old), Path(new), set(self.unsynced)))
        self._real[name](old, new)
        self.unsynced = {Path(new) if path == Path(old) else path for path in self.unsynced} | {Path(new).parent}

    def replace(self, old: Any, new: Any) -> None:
        self._rename("replace", old, new)

    def rename(self, old: Any, new: Any) -> None:
        self._rename("rename", old, new)

    def unlink(self, path: Any, **named: Any) -> None:
        self._real["unlink"](path, **named)
        self.unsynced.discard(Path(path))

    def symlink(self, target: Any, link: Any) -> None:
        self.linked.append((str(target), set(self.unsynced)))
        self._real["symlink"](target, link)
        self.unsynced.add(Path(link).parent)

    def mkdir(self, path: Any, *more: Any) -> None:
        self._real["mkdir"](path, *more)
        self.unsynced |= {Path(path), Path(path).parent}


def test_files_are_synced_before_the_final_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    final = save(tmp_path, filled(7), 7, world=2)
    monkeypatch.undo()
    ((temporary, unsynced),) = [(old, lost) for old, new, lost in disk.renames if new == final]
    assert [path for path in unsynced if path == temporary or temporary in path.parents] == []


def test_manifest_is_written_last_and_latest_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    final = save(tmp_path, filled(7), 7, world=2)
    monkeypatch.undo()
    assert [new.name for _, new, _ in disk.renames][-3:] == ["MANIFEST.json", step_name(7), "latest"]
    manifest = disk.renames[-3]
    data = {path.name for path in manifest[2] if path.name.endswith((".distcp", ".metadata"))}
    assert data == set(), "the files it lists are on disk before it"
    assert disk.linked == [(final.name, set())], "the target of `latest` is on disk before the link"


def test_save_leaves_nothing_unsynced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    save(tmp_path, filled(7), 7, world=2)
    monkeypatch.undo()
    assert {path for path in disk.unsynced if path.exists()} == set()
