"""Which nodes a run has left, where its job's comment cannot say so.

Without accounting Slurm (22.05) refuses every change of a job that has lost a node ("the DB index is being set"). The
run's own status tells the same. It is a file of the user's: believed only of that user's own job.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.recovery.facts import is_active
from dalsegno.recovery.records import Record
from dalsegno.runs.comment import left_comment, read_comment
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.status import RunPhase, Status, status_from_json
from dalsegno.slurm.facts import JobInfo

MOST_BYTES = 1 << 20


def with_hint(job: JobInfo, wanted: Collection[str], runs: Mapping[str, Record]) -> JobInfo:
    """The job as its comment would tell of it; `wanted` are nodes that are to be mended."""
    record = runs.get(job.name)
    here = frozenset(wanted) & set(job.nodes)
    comment = read_comment(job.comment)
    if not here or not record or comment is None or comment.left or not is_active(job):
        return job
    status = read_hint(RunFolder(Path(record.folder)).status, record.uid)
    if status is None or not status.nodes:  # a run of srun's own tasks names none, and needs all that it has
        return job
    if status.phase is not RunPhase.RUNNING or job.id not in status.jobs or job.uid != record.uid:
        return job
    left = here - {node.name for node in status.nodes}
    return replace(job, comment=left_comment(comment.role, left))


def read_hint(path: Path, uid: int) -> Status | None:
    """A user's file, read as root: a plain one, the user's own, and not for long; None for anything else."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != uid:
            return None
        value = json.loads(os.read(handle, MOST_BYTES))
        return status_from_json(value) if isinstance(value, dict) else None
    except (OSError, ValueError, RecursionError, TypeError, DalsegnoError):
        return None
    finally:
        os.close(handle)
