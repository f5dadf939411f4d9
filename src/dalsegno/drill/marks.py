"""What a run's coordinator and the cluster's controller noted, as marks of a drill. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dalsegno.drill.story import DRAINED, KNOWN, RETURNED, VALIDATED, Mark
from dalsegno.launch.journal import Entry


def marks_of_run(entries: Iterable[Entry]) -> Iterator[Mark]:
    for entry in entries:
        at, node = float(entry["at"]), str(entry.get("node", ""))
        if entry.get("event") == "lost":
            yield Mark(at, KNOWN, node, f"the run misses it: {entry.get('why')}")
        elif entry.get("event") == "cold":
            yield Mark(at, KNOWN, node, str(entry.get("why")))
        elif entry.get("event") == "failed" and not entry.get("noise"):
            yield Mark(at, KNOWN, node, f"rank {entry.get('rank')} {entry.get('what')}")
        elif entry.get("event") == "generation":
            nodes = ", ".join(map(str, entry.get("nodes", ())))
            yield Mark(at, "generation", "", f"generation {entry.get('generation')} on {nodes}")


def troubles_of(entries: Iterable[Entry]) -> str:
    """How often a run had to start again, and what it was the first time; "" where it went through."""
    known = list(entries)
    again = max((int(entry["generation"]) for entry in known if entry.get("event") == "generation"), default=1) - 1
    first = next((mark for mark in marks_of_run(known) if mark.what == KNOWN), None)
    why = f"{first.node}: {first.text}" if first else ""
    if again < 1:
        return why
    return f"it started again {again} time{'s' * (again != 1)}" + (f", at first because of {why}" if why else "")


_MEANS = {"drain": DRAINED, "setdown": DRAINED, "validate": VALIDATED, "return": RETURNED, "hold": RETURNED}


def marks_of_controller(events: Iterable[Mapping[str, Any]]) -> Iterator[Mark]:
    """What it only began, or could not do, is told by its own word."""
    for event in events:
        kind, text = str(event["kind"]), str(event["text"])
        done = not text.startswith(("begins to", "could not"))
        what = KNOWN if _tells_of_a_fault(kind, text) else _MEANS.get(kind, kind) if done else kind
        yield Mark(float(event["at"]), what, str(event["node"]), text)


def _tells_of_a_fault(kind: str, text: str) -> bool:
    """Of a node that is suspected already, and that the budget holds back, the next fault is but a note."""
    return (kind == "turn" and text.startswith("suspected")) or (kind == "note" and "; left as it is: " in text)
