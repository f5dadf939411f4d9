"""Where checks put what they find. It knows what was cut from the file, and keeps quiet about that."""

from __future__ import annotations

from typing import Any

from dalsegno.errors import Problem
from dalsegno.spec.document import Document, Path
from dalsegno.spec.section import Section, place


class Report:
    """Collects problems with their lines."""

    def __init__(self, document: Document, cut: set[Path], written: Any = None) -> None:
        self._document = document
        self._written = written  # the file's values before anything was cut
        self._cut = cut
        self._around = {path[:length] for path in cut for length in range(len(path) + 1)}

    def add(self, section: Section, field: str, what: str, hint: str = "", reads: tuple[str, ...] = ()) -> None:
        """Notes a problem at `field` of a section, unless that, or a field it was judged by, was faulty itself."""
        here = place(section)
        if all(self.whole(*here, name) for name in (field, *reads)):
            self._document.problems.append(Problem(what, self._document.where((*here, *field.split("."))), hint))

    def whole(self, *path: str | int) -> bool:
        """Nothing at, below or around `path` was cut."""
        outside = any(path[:length] in self._cut for length in range(len(path) + 1))
        return not outside and path not in self._around

    def complete(self, *path: str | int) -> bool:
        """The list at `path` has all its entries (though some may lack a value)."""
        return not any(cut[: len(path)] == path and len(cut) <= len(path) + 1 for cut in self._cut)

    def unnamed(self, name: str, *path: str) -> bool:
        """No entry of the list at `path` bears this name in the file, not even a faulty one."""
        entries = self._written
        for key in path:
            entries = entries.get(key) if isinstance(entries, dict) else None
        if not isinstance(entries, list):
            return entries is None
        names = [entry.get("name") if isinstance(entry, dict) else None for entry in entries]
        return all(isinstance(one, str) and one.lower() != name.lower() for one in names)

    def line(self, section: Section, field: str = "name") -> int:
        """The line of a field, for messages that point to a second place."""
        return int(self._document.where((*place(section), field)).rpartition(":")[2])
