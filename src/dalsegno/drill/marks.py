"""What a run's coordinator and the cluster's controller noted, as marks of a drill. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dalsegno.drill.story import KNOWN, Mark
from dalsegno.launch.journal import Entry


def marks_of_run(entries: Iterable[Entry]) -> Iterator[Mark]:
    for entry in entries:
        at, node = float(entry["at"]), str(entry.get("node", ""))
        if entry.get("event") == "lost":
            yield Mark(at, KNOWN, node, f"the run misses it: {entry.get('why')}")
        elif entry.get("event") == "failed" and not entry.get("noise"):
            yield Mark(at, KNOWN, node, f"rank {entry.get('rank')} {entry.get('what')}")
        elif entry.get("event") == "generation":
            nodes = ", ".join(map(str, entry.get("nodes", ())))
            yield Mark(at, "generation", "", f"generation {entry.get('generation')} on {nodes}")
