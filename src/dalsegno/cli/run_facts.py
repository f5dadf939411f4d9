"""What the commands say of a run: its state in a word, its age, and all of it as JSON."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dalsegno.cli import out

if TYPE_CHECKING:
    from dalsegno.runs.folder import RunFolder
    from dalsegno.runs.status import Status


def state_of(status: Status, now: float) -> str:
    """Its phase; of one that is over, how it ended; and whether its coordinator has died meanwhile."""
    from dalsegno.cli.watch import coordinator_is_dead, is_over, silent_s
    from dalsegno.runs.status import RunCause

    if is_over(status):
        if status.exit_code == 0:
            return "done"
        if status.cause.cancelled:
            return "cancelled"
        return "lost" if status.cause is RunCause.CLUSTER_GONE else "failed"
    phase = "ending" if status.over else status.phase.value
    if coordinator_is_dead(status):
        return f"{status.phase.value}, no coordinator"
    silent = silent_s(status, now)
    return phase if silent is None else f"{phase}, silent for {age(silent)}"


def age(seconds: float) -> str:
    """Roughly: 40s, 12m, 5h, 3d."""
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def facts_of(run: RunFolder, status: Status) -> dict[str, Any]:
    from dalsegno.cli.watch import job_ids
    from dalsegno.spec.facts import facts_to_json

    known = {"state": state_of(status, time.time()), "folder": str(run.root.resolve()), "jobs": job_ids(run, status)}
    return {**facts_to_json(status), **known}


def status_of(run: RunFolder) -> Status | None:
    """One that cannot be read must not hide the others; one whose cluster is gone does not go on."""
    from dalsegno.cli.watch import cluster_is_gone, lost
    from dalsegno.errors import DalsegnoError
    from dalsegno.runs.status import read_status

    try:
        status = read_status(run.status)
        return lost(status) if status and not status.over and cluster_is_gone(run) else status
    except (DalsegnoError, OSError) as error:
        out.warn(f"run {run.run} cannot be read: {error}")
        return None
