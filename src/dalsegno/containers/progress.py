"""How an import tells how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Stages, each of so many bytes, of which some may be here already; called from several threads."""

    def stage(self, text: str, total: int = 0, here: int = 0) -> None: ...

    def advance(self, count: int) -> None: ...

    def warn(self, text: str) -> None: ...


class Silent:
    """Tells nothing."""

    def stage(self, text: str, total: int = 0, here: int = 0) -> None: ...

    def advance(self, count: int) -> None: ...

    def warn(self, text: str) -> None: ...
