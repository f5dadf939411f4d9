"""What a drill hears of: what the run's coordinator and the cluster's controller note, as it is noted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dalsegno.drill.marks import marks_of_controller, marks_of_run
from dalsegno.drill.story import RETURNED, Mark
from dalsegno.errors import DalsegnoError
from dalsegno.launch import journal
from dalsegno.launch.folder import RunFolder
from dalsegno.recovery.client import ask
from dalsegno.recovery.held import Held

EVERY_S = 0.2
ANSWER_S = 2.0


class Ears:
    """`controller` is its socket; a cluster without one is told of by the run alone."""

    def __init__(self, run: RunFolder, controller: Path | None) -> None:
        self.marks: list[Mark] = []
        self._run, self._controller = run, controller
        self._entries, self._event, self._next = 0, self._last_event(), 0.0

    def listen(self, at_once: bool = False) -> list[Mark]:
        """What is new since the last time; without haste only now and then."""
        if time.monotonic() < self._next and not at_once:
            return []
        self._next = time.monotonic() + EVERY_S
        new = sorted([*self._of_run(), *self._of_controller()], key=lambda mark: mark.at)
        self.marks += new
        return new

    def is_back(self, node: str, since: float) -> bool:
        """Whether it was returned to service after that."""
        return any(mark.what == RETURNED and mark.node == node and mark.at > since for mark in self.marks)

    def automation(self) -> dict[str, Any] | None:
        """What the controller says of itself; None where there is none."""
        if self._controller is None:
            return None
        with contextlib.suppress(DalsegnoError):
            return dict(ask(self._controller, {"automation": "status"}, ANSWER_S))
        return {}

    def nodes(self) -> list[dict[str, Any]]:
        """What the controller says of each; none where it does not answer now."""
        return nodes_known_to(self._controller)

    def _of_run(self) -> list[Mark]:
        entries = list(journal.read(self._run.journal))
        new, self._entries = entries[self._entries :], len(entries)
        return list(marks_of_run(new))

    def _of_controller(self) -> list[Mark]:
        events = self._events(self._event)
        self._event = max([self._event, *(int(event["id"]) for event in events)])
        return list(marks_of_controller(events))

    def _last_event(self) -> int:
        return max((int(event["id"]) for event in self._events(-1)), default=0)

    def _events(self, since: int) -> list[dict[str, Any]]:
        """None where the controller does not answer now: it is asked again."""
        if self._controller is None:
            return []
        with contextlib.suppress(DalsegnoError):
            return list(ask(self._controller, {"events": since}, ANSWER_S).get("events", []))
        return []


def held_back(nodes: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Nodes that the controller will not mend soon, and why."""
    return {str(node["node"]): str(node["note"]) for node in nodes if Held.of(node.get("held_back")).lasting}


def nodes_known_to(controller: Path | None) -> list[dict[str, Any]]:
    """What the controller says of each node; nothing where there is none, or it does not answer now."""
    if controller is None:
        return []
    with contextlib.suppress(DalsegnoError):
        return list(ask(controller, {"nodes": True}, ANSWER_S).get("nodes", []))
    return []
