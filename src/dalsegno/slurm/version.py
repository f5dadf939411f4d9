"""Which Slurm is running: settings and formats follow it."""

from __future__ import annotations

import re
from typing import NamedTuple

from dalsegno.errors import DalsegnoError

_NUMBER = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


class Version(NamedTuple):
    """A Slurm release, ordered: `Version(22, 5, 8) < Version(23, 2)`."""

    major: int
    minor: int
    patch: int = 0

    @classmethod
    def parse(cls, text: str) -> Version:
        """The version in whatever a Slurm command says: `slurm-wlm 22.05.8`, `24.11.0-0rc1`."""
        found = _NUMBER.search(text)
        if found is None:
            raise DalsegnoError(f"no Slurm version in {text.strip()[:80]!r}", hint="`sinfo --version` says it")
        return cls(int(found[1]), int(found[2]), int(found[3] or 0))

    @property
    def release(self) -> str:
        """Return the release without its patches: `24.11`."""
        return f"{self.major}.{self.minor:02d}"

    def __str__(self) -> str:
        return f"{self.major}.{self.minor:02d}.{self.patch}"
