"""Combine the step reports of a node's workers, so that a coordinator with thousands of nodes gets few messages."""

from __future__ import annotations

import contextlib

from dalsegno.wire.frames import Message

REPORT_EVERY_S = 0.4  # minimum time between two messages of a node; each worker reports twice a second


class StepReports:
    """Selects the reports that the coordinator gets. All ranks do the same steps, so one rank's report is enough.

    The first report of a generation, the progress of rank 0 and the end of the steps are always sent.
    """

    def __init__(self) -> None:
        self.interval_s = REPORT_EVERY_S
        self._busy = BusyTimes()
        self._generation: int | None = None
        self._due = 0.0

    def join(self, message: Message, step: int, generation: int | None, now: float) -> Message | None:
        """Record a worker's report. Return the message for the coordinator; None if no message is due."""
        self._busy.note(message)
        progress, over = message.get("progress"), message.get("over")
        if now < self._due and generation == self._generation and not progress and not over:
            return None
        self._generation, self._due = generation, now + self.interval_s
        report = {"step": step, "generation": generation, "progress": progress, "over": over}
        return {**report, **self._busy.take(now)}


# The busy time of each rank's steps, for the detection of slow ranks


BUSY_EVERY_S = 1.0
MAX_BUSY_S, MAX_WORKERS = 1e6, 1024


class BusyTimes:
    """Collects the busy times that this node's workers report. `take` returns them at most once a second."""

    def __init__(self) -> None:
        self._latest: dict[int, float] = {}
        self._due = 0.0

    def note(self, message: Message) -> None:
        """Record a worker's report. Invalid values are ignored, because they come from the user's code."""
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            rank, busy_s = int(message["rank"]), float(message["busy_s"])
            if 0 <= busy_s < MAX_BUSY_S and len(self._latest) < MAX_WORKERS:
                self._latest[rank] = busy_s

    def take(self, now: float) -> Message:
        """Return fields to add to the next message to the coordinator; empty if none are due."""
        if not self._latest or now < self._due:
            return {}
        latest, self._latest, self._due = self._latest, {}, now + BUSY_EVERY_S
        return {"busy": {str(rank): seconds for rank, seconds in latest.items()}}
