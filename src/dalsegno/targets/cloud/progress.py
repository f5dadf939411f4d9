"""Follow an operation in a cloud: report its events, and find the first failure.

The operation does not depend on this process. If this process ends, the next `up` or `down` follows the operation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from dalsegno.printable import one_line
from dalsegno.system.files import make_folder, write_atomic
from dalsegno.targets.base import Say
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal, hint_for, refusal_in_text

POLL_S = 15.0


class OperationState(Enum):
    """The state of an operation in a cloud."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    GONE = "gone"  # the resource does not exist any more


class ResourceEventKind(Enum):
    """The kinds of news that an event of an operation reports about its resource."""

    STARTED = "started"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"  # the cloud cancelled it because another resource failed
    OTHER = "other"


@dataclass(frozen=True)
class ResourceEvent:
    """One event of an operation, as the cloud reports it. `id` is unique within the operation."""

    id: str
    resource: str  # name and type of the resource, such as "HeadNode (AWS::EC2::Instance)"
    kind: ResourceEventKind
    message: str = ""
    at: str = ""


@dataclass(frozen=True)
class OperationReport:
    """The state of an operation and its events so far, the oldest first."""

    state: OperationState
    events: tuple[ResourceEvent, ...] = ()
    message: str = ""  # the cloud's own message about the whole operation
    logs: tuple[tuple[str, str], ...] = ()  # more logs, by file name; they are written to disk if the operation failed


Poll = Callable[[], OperationReport]


def first_failure(events: Iterable[ResourceEvent]) -> ResourceEvent | None:
    """Return the event that made an operation fail: the first failure that no other failure has caused."""
    return next((event for event in events if event.kind is ResourceEventKind.FAILED), None)


def follow(
    what: str,
    poll: Poll,
    say: Say,
    logs: Path,
    *,
    pause: Callable[[float], None] = time.sleep,
    every_s: float = POLL_S,
    again: str = "dalsegno up",
) -> OperationReport:
    """Show the progress of an operation until it ends, and return its last report. Raise CloudError if it failed.

    `again` is the command that repeats the operation.

    The first failure is shown at once, even if the operation then continues for minutes.
    """
    seen: set[str] = set()
    done: set[str] = set()
    failure: ResourceEvent | None = None
    while True:
        report = poll()
        for event in report.events:
            if event.id in seen:
                continue
            seen.add(event.id)
            if event.kind is ResourceEventKind.DONE:
                done.add(event.resource)
        if failure is None and (failure := first_failure(report.events)):
            say(f"FAILED: {_describe(failure)}")
        if report.state is not OperationState.RUNNING:
            break
        say(_progress(what, failure, report.events, len(done)))
        pause(every_s)
    if report.state is OperationState.FAILED:
        raise failed(what, report, keep_logs(logs, report), again)
    return report


def _progress(what: str, failure: ResourceEvent | None, events: Sequence[ResourceEvent], done: int) -> str:
    if failure is not None:
        return f"FAILED: {_describe(failure)}; {what} goes on until the cloud stops it"
    last = next((event for event in reversed(events) if event.kind is ResourceEventKind.STARTED), None)
    now = f", now {last.resource}" if last else ""
    return f"{what}: {done} resources done{now}"


def _describe(event: ResourceEvent) -> str:
    return one_line(f"{event.resource}: {event.message or 'no message'}")


def keep_logs(folder: Path, report: OperationReport) -> Path:
    """Write the events and logs of a failed operation to files that only the owner can read; return their folder."""
    make_folder(folder, 0o700)
    lines = [
        json.dumps({"at": e.at, "resource": e.resource, "event": e.kind.value, "message": e.message})
        for e in report.events
    ]
    write_atomic(folder / "events.jsonl", "".join(f"{line}\n" for line in lines), 0o600)
    for name, text in report.logs:
        write_atomic(folder / name, text, 0o600)
    return folder


def failed(what: str, report: OperationReport, logs: Path, again: str = "dalsegno up") -> CloudError:
    """Return the error for a failed operation: the resource that failed first, its message, and where the logs are."""
    failure = first_failure(report.events)
    said = _describe(failure) if failure else one_line(report.message or "the cloud gave no reason")
    others = [event.resource for event in report.events if event.kind is ResourceEventKind.FAILED][1:]
    more = f"\n  also failed: {one_line(', '.join(dict.fromkeys(others[:5])))}" if others else ""
    cause = refusal_in_text(said)
    fix = hint_for(cause) if cause in (CloudRefusal.CAPACITY, CloudRefusal.QUOTA) else "fix the cause"
    return CloudError(
        cause,
        f"{what} failed: {said}{more}",
        hint=f"all events and logs are in {logs}; {fix}, then run `{again}` again",
    )
