"""How far a run has got and where its time went: kept by the coordinator, in a file of its own."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.launch.generations import Run
from dalsegno.launch.goodput import Goodput, follow, granted, passes, stepped
from dalsegno.launch.run_files import read_value
from dalsegno.launch.words import Stepped
from dalsegno.spec.facts import facts_from_json, facts_to_json
from dalsegno.system.files import write_atomic

WRITE_S = 1.0


@dataclass(frozen=True)
class Progress:
    """As the first rank reports it. `figures` are its last ones: loss, step time, samples per second …"""

    account: Goodput
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.account.step


class Pen:
    """Writes it down now and then. One that was written by a former coordinator is gone on with."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.progress = self._former() or Progress(Goodput(at=time.time()))
        self._written = 0.0

    def _former(self) -> Progress | None:
        with contextlib.suppress(DalsegnoError):  # damaged: only the account begins anew
            return read_progress(self._path)
        return None

    def changed(self, before: Run, after: Run) -> None:
        account = follow(self.progress.account, before, after, time.time())
        self.progress = replace(self.progress, account=account)

    def granted(self) -> None:
        """The run has its first nodes."""
        self.progress = replace(self.progress, account=granted(self.progress.account, time.time()))

    def stepped(self, word: Stepped) -> None:
        if word.progress:
            saving_s = word.progress.get("saving_s", 0.0)
            account = stepped(self.progress.account, time.time(), word.step, saving_s)
            self.progress = Progress(account, dict(word.progress))

    def write(self, last: bool = False) -> None:
        """Only of a run that reports steps."""
        if not self.progress.figures or (time.monotonic() - self._written < WRITE_S and not last):
            return
        self._written = time.monotonic()
        self.progress = replace(self.progress, account=passes(self.progress.account, time.time()))
        with contextlib.suppress(DalsegnoError, OSError):  # a full disk must not end the run
            text = json.dumps(facts_to_json(self.progress), indent=1)
            write_atomic(self._path, text, mode=0o644, durable=False)


def read_progress(path: Path) -> Progress | None:
    """None for a run whose script reports no steps."""
    data = read_value(path)
    return facts_from_json(Progress, data) if isinstance(data, Mapping) else None
