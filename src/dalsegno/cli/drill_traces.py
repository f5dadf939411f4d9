"""What a drill has put into the world: noted before it is done, and taken back however the drill ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dalsegno.cli.interrupts import to_the_end
from dalsegno.errors import DalsegnoError

if TYPE_CHECKING:
    from pathlib import Path

    from dalsegno.cli.drill_ears import Ears
    from dalsegno.drill.lots import Kind
    from dalsegno.launch.folder import RunFolder
    from dalsegno.targets.base import CanBreak


@dataclass(frozen=True)
class Strike:
    kind: Kind
    node: str
    at: float


@dataclass
class Traces:
    """Runs and faults of this drill; those of others are not its affair."""

    target: CanBreak
    runs: list[RunFolder] = field(default_factory=list)
    strikes: list[Strike] = field(default_factory=list)
    ears: Ears | None = None  # of the run under way
    done: list[str] = field(default_factory=list)  # to take them back, in words

    def strike(self, kind: Kind, node: str) -> None:
        from dalsegno.targets.faults import FAULTS

        self.strikes.append(Strike(kind, node, time.time()))
        self.target.inject(FAULTS[kind.fault], node, kind.options)

    @contextmanager
    def removed(self, say: Callable[[str], None]) -> Iterator[None]:
        """Afterwards; where the drill was cut short, what was done about it is said in a line."""
        try:
            yield
        except BaseException:
            to_the_end(self.remove)
            if said := [*self.done, *self._left_off()]:
                say(f"the drill is cut short: {'; '.join(said)}")
            raise
        to_the_end(self.remove)

    def remove(self) -> None:
        for run in self.runs:
            self._end(run)
        self._undo()

    def discard(self, home: Path) -> None:
        """Its runs, when all of them that anybody will ask for stands in the report."""
        from dalsegno.jobs import discard_run

        for run in self.runs:
            with contextlib.suppress(OSError):
                discard_run(run, home)

    def _end(self, run: RunFolder) -> None:
        from dalsegno.cli.cancel import end_run
        from dalsegno.cli.last_runs import is_under_way

        if not is_under_way(run):
            return
        try:
            end_run(run, lambda text: None)
            self.done.append(f"run {run.run} is cancelled")
        except DalsegnoError as error:
            self.done.append(error.what)

    def _undo(self) -> None:
        """What was there before ours is left."""
        own = {(each.kind.fault, each.node): each.at for each in self.strikes}
        for wound in self.target.injected():
            if wound.at >= own.get((wound.fault, wound.node), float("inf")):
                try:
                    self.target.clear(wound.node, wound.fault)
                    self.done.append(f"{wound.fault} on {wound.node} is undone")
                except DalsegnoError as error:
                    self.done.append(f"{wound.fault} on {wound.node} is not undone: {error.what}")

    def _left_off(self) -> list[str]:
        """A host without power is no fault to undo, but one to mend."""
        if self.ears is not None:
            self.ears.listen()
        cuts = {each.node: each.at for each in self.strikes if each.kind.fault == "power-off"}
        gone = [node for node, at in cuts.items() if self.ears is None or not self.ears.is_back(node, at)]
        mends = "the controller mends it if it may, and `dalsegno up` boots it"
        return [f"{node} may still be off: {mends}" for node in gone]
