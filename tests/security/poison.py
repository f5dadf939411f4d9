"""A pickle that runs code of an attacker."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Poison:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)
