"""Entries of a run's journal as sentences. Users own these files, so a value may have any type. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dalsegno.runs.journal import Entry, RunEvent
from dalsegno.web.html import Markup, moment, plural, tag

MAX_TEXT = 300
MAX_ENTRIES = 60
MAX_NAMES = 4


def journal_list(entries: Sequence[Entry]) -> Markup:
    """Return the last entries, newest first."""
    rows = [tag("li", moment(float(entry["at"])), " ", entry_text(entry)) for entry in reversed(entries[-MAX_ENTRIES:])]
    return tag("ul", rows, class_="list") if rows else tag("p", "The journal is empty.", class_="empty")


def entry_text(entry: Entry) -> str:
    """Return a journal entry as a sentence. An entry of an unknown kind is shown with all its details."""
    event = str(entry.get("event", ""))
    known = _SENTENCES.get(event)
    if known is not None:
        return known(entry)[:MAX_TEXT]
    details = [f"{key} {_shown(value)}" for key, value in entry.items() if key not in ("at", "event", "text")]
    return f"{event}: {entry.get('text') or ', '.join(details)}"[:MAX_TEXT]


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"{len(value)} entries" if len(value) > MAX_NAMES else " ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _nodes(entry: Entry) -> str:
    """Return `n1, n2`, or the number of nodes if there are many."""
    nodes = entry.get("nodes")
    if not isinstance(nodes, list):
        return "its nodes"
    return plural(len(nodes), "node") if len(nodes) > MAX_NAMES else ", ".join(map(str, nodes))


def _because(entry: Entry) -> str:
    return f": {entry['why']}" if entry.get("why") else ""


def _ready(entry: Entry) -> str:
    seconds = entry.get("seconds")
    after = f" after {seconds:.1f} s" if isinstance(seconds, (int, float)) else ""
    return f"{entry.get('node')} is ready{after}{', with modules imported in advance' if entry.get('warm') else ''}"


def _pause(entry: Entry) -> str:
    seconds = entry.get("seconds")
    for_s = f" {seconds:.0f} s" if isinstance(seconds, (int, float)) else ""
    return f"waits{for_s} before the next restart"


_SENTENCES: dict[str, Callable[[Entry], str]] = {
    RunEvent.BEGAN.value: lambda entry: f"the coordinator started on {entry.get('host')}",
    RunEvent.CAME_BACK.value: lambda entry: f"another coordinator took over on {entry.get('host')}",
    RunEvent.GRANTED.value: lambda entry: f"Slurm granted job {entry.get('job')}: {_nodes(entry)}",
    RunEvent.REFUSED.value: lambda entry: f"Slurm refused a job{_because(entry)}",
    RunEvent.JOB_OVER.value: lambda entry: f"job {entry.get('job')} is over: {str(entry.get('state')).lower()}",
    RunEvent.READY.value: _ready,
    RunEvent.COLD.value: lambda entry: f"{entry.get('node')} has to import modules again{_because(entry)}",
    RunEvent.SIGNAL.value: lambda entry: f"{entry.get('node')} received signal {entry.get('signal')}",
    RunEvent.LOST.value: lambda entry: f"{entry.get('node')} is lost{_because(entry)}",
    RunEvent.LEFT.value: lambda entry: f"the run left {entry.get('node')}{_because(entry)}",
    RunEvent.GENERATION.value: lambda entry: f"generation {entry.get('generation')} starts on {_nodes(entry)}",
    RunEvent.FIRST_STEP.value: lambda entry: f"first step of generation {entry.get('generation')}: {entry.get('step')}",
    RunEvent.FAILED.value: lambda entry: (
        f"rank {entry.get('rank')} on {entry.get('node')} {entry.get('what', 'failed')}"
    ),
    RunEvent.PAUSE.value: _pause,
    RunEvent.NOTE.value: lambda entry: str(entry.get("text", "")),
    RunEvent.RESTS.value: lambda entry: f"the coordinator stops, another one will continue the run{_because(entry)}",
    RunEvent.ENDED.value: lambda entry: f"the run ended with exit code {entry.get('code')}{_because(entry)}",
}
