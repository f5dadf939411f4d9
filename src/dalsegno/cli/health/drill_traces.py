"""The runs and faults of a drill: recorded before they start, and always undone at the end."""

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

    from dalsegno.drill.schedule import FaultKind
    from dalsegno.runs.folder import RunFolder
    from dalsegno.targets.base import CanInject

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.system.files import locked, remove_tree

if TYPE_CHECKING:
    from dalsegno.runs.folder import RunFolder

from collections.abc import Iterable, Mapping
from typing import Any

from dalsegno.drill.impacts import DrillMark, DrillMarkKind, marks_of_controller, marks_of_run
from dalsegno.recovery.client import ask
from dalsegno.recovery.decisions.phase import HeldAction
from dalsegno.runs import journal
from dalsegno.runs.folder import RunFolder


@dataclass(frozen=True)
class DrillInjection:
    kind: FaultKind
    node: str
    at: float


@dataclass
class Traces:
    """The runs and faults of this drill. Runs and faults of others are never undone."""

    target: CanInject
    runs: list[RunFolder] = field(default_factory=list)
    injections: list[DrillInjection] = field(default_factory=list)
    journal_reader: JournalReader | None = None  # reads the journal of the active run
    done: list[str] = field(default_factory=list)  # what was undone, as sentences

    def inject(self, kind: FaultKind, node: str) -> None:
        from dalsegno.inject.faults import FAULTS

        self.injections.append(DrillInjection(kind, node, time.time()))
        self.target.inject(FAULTS[kind.fault], node, kind.options)

    @contextmanager
    def removed(self, say: Callable[[str], None]) -> Iterator[None]:
        """Undo everything after the `with` block. If the drill was interrupted or failed, report in one line what was
        undone."""
        try:
            yield
        except BaseException:
            to_the_end(self.remove)
            if undone := [*self.done, *self._hosts_left_off()]:
                say(f"the drill is cut short: {'; '.join(undone)}")
            raise
        to_the_end(self.remove)

    def remove(self) -> None:
        for run in self.runs:
            self._end(run)
        self._undo()

    def discard(self, home: Path) -> None:
        """Delete the folders of the drill's runs. Call this only after the report is written."""
        from dalsegno.runs.submit.prepare import discard_run

        for run in self.runs:
            with contextlib.suppress(OSError):
                discard_run(run, home)

    def _end(self, run: RunFolder) -> None:
        from dalsegno.cli.training.cancel import end_run
        from dalsegno.cli.training.watch import is_under_way

        if not is_under_way(run):
            return
        try:
            end_run(run, lambda text: None)
            self.done.append(f"run {run.run} is cancelled")
        except DalsegnoError as error:
            self.done.append(error.what)

    def _undo(self) -> None:
        """Undo the faults of this drill. Faults that were active before it stay."""
        own = {(each.kind.fault, each.node): each.at for each in self.injections}
        for fault in self.target.injected():
            if fault.at >= own.get((fault.fault, fault.node), float("inf")):
                try:
                    self.target.clear(fault.node, fault.fault)
                    self.done.append(f"{fault.fault} on {fault.node} is undone")
                except DalsegnoError as error:
                    self.done.append(f"{fault.fault} on {fault.node} is not undone: {error.what}")

    def _hosts_left_off(self) -> list[str]:
        """Return a sentence for each host that this drill switched off and that may still be off: undoing the fault
        does not boot the host."""
        if self.journal_reader is not None:
            self.journal_reader.listen()
        cuts = {each.node: each.at for each in self.injections if each.kind.fault == "power-off"}
        gone = [
            node
            for node, at in cuts.items()
            if self.journal_reader is None or not self.journal_reader.is_back(node, at)
        ]
        then = "the controller repairs it if it may, and `dalsegno up` boots it"
        return [f"{node} may still be off: {then}" for node in gone]


PREFIX = ".drill-"  # `dalsegno runs` does not list names with a leading dot
LOCK = "lock"  # held until the drill's process ends


@contextmanager
def drill_folder(home: Path) -> Iterator[Path]:
    """Create a folder that all nodes see, and remove it after the `with` block.

    The folder is locked before it gets its final name, so that no other drill removes it as a leftover.
    """
    home.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".new-drill-", dir=home))
    with locked(made / LOCK, "this drill"):
        folder = made.rename(home / made.name.replace(".new-drill-", PREFIX))
        try:
            yield folder
        finally:
            with contextlib.suppress(OSError):
                remove_tree(folder)


def clear_leftovers(home: Path, end: Callable[[RunFolder], None] | None = None) -> None:
    """Remove the folders of drills that were killed.

    If a run still trains in such a folder, `end` is called to end the run first. Without `end`, the folder is kept.
    """
    for folder in home.glob(f"{PREFIX}*"):
        with contextlib.suppress(DalsegnoError, OSError), locked(folder / LOCK, "a drill", wait_s=0.0):
            runs = _training_in(folder, home)
            if end is not None:
                for run in runs:
                    end(run)
            if end is not None or not runs:
                remove_tree(folder)


def _training_in(folder: Path, home: Path) -> list[RunFolder]:
    from dalsegno.cli.training.watch import cluster_is_gone, is_under_way
    from dalsegno.runs.submit.prepare import list_runs, read_plan

    under_way = [run for run in list_runs(home) if is_under_way(run) and not cluster_is_gone(run)]
    return [run for run in under_way if folder in Path(read_plan(run).request.chdir).parents]


EVERY_S = 0.2
ANSWER_S = 2.0


class JournalReader:
    """The reader of the run's journal and of the controller's events. `controller` is the controller's socket; None if
    there is no controller."""

    def __init__(self, run: RunFolder, controller: Path | None) -> None:
        self.marks: list[DrillMark] = []
        self._run, self._controller = run, controller
        self._entries, self._event, self._next = 0, self._last_event(), 0.0

    def listen(self, at_once: bool = False) -> list[DrillMark]:
        """Return the marks since the last call. Unless `at_once`, read at most every 0.2 s."""
        if time.monotonic() < self._next and not at_once:
            return []
        self._next = time.monotonic() + EVERY_S
        new = sorted([*self._of_run(), *self._of_controller()], key=lambda mark: mark.at)
        self.marks += new
        return new

    def is_back(self, node: str, since: float) -> bool:
        """Return whether the node was returned to service after `since`."""
        return any(mark.kind is DrillMarkKind.RETURNED and mark.node == node and mark.at > since for mark in self.marks)

    def automation(self) -> dict[str, Any] | None:
        """Return the state of automatic recovery; None if there is no controller, {} if it does not answer."""
        if self._controller is None:
            return None
        with contextlib.suppress(DalsegnoError):
            return dict(ask(self._controller, {"automation": "status"}, ANSWER_S))
        return {}

    def nodes(self) -> list[dict[str, Any]]:
        """Return the controller's facts about each node; empty if there is no controller or it does not answer now."""
        return nodes_known_to(self._controller)

    def _of_run(self) -> list[DrillMark]:
        entries = list(journal.read(self._run.journal))
        new, self._entries = entries[self._entries :], len(entries)
        return list(marks_of_run(new))

    def _of_controller(self) -> list[DrillMark]:
        events = self._events(self._event)
        self._event = max([self._event, *(int(event["id"]) for event in events)])
        return list(marks_of_controller(events))

    def _last_event(self) -> int:
        return max((int(event["id"]) for event in self._events(-1)), default=0)

    def _events(self, since: int) -> list[dict[str, Any]]:
        """Return the controller's events after `since`. If the controller does not answer, return an empty list; the
        next call asks again."""
        if self._controller is None:
            return []
        with contextlib.suppress(DalsegnoError):
            return list(ask(self._controller, {"events": since}, ANSWER_S).get("events", []))
        return []


def held_back(nodes: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the nodes that the controller will not repair soon, each with the reason."""
    return {str(node["node"]): str(node["note"]) for node in nodes if HeldAction.of(node.get("held_back")).lasting}


def nodes_known_to(controller: Path | None) -> list[dict[str, Any]]:
    """Return the controller's facts about each node; empty if there is no controller or it does not answer now."""
    if controller is None:
        return []
    with contextlib.suppress(DalsegnoError):
        return list(ask(controller, {"nodes": True}, ANSWER_S).get("nodes", []))
    return []
