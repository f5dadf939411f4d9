"""Find the nodes that a run has left, if the comment of its job cannot list them.

Without accounting, Slurm 22.05 refuses every change to a job that has lost a node ("the DB index is being set"). The
run's status file holds the same information. It belongs to a user, so it counts only for that user's own job.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health import Finding, Verdict
from dalsegno.recovery.decisions.facts import is_active
from dalsegno.recovery.runs.run_records import RunRecord
from dalsegno.runs.comment import left_comment, read_comment
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.status import RunPhase, RunStatus, status_from_json
from dalsegno.slurm.facts import JobInfo
from dalsegno.system.ownership import open_owned

MAX_BYTES = 1 << 20


def with_hint(job: JobInfo, wanted: Collection[str], runs: Mapping[str, RunRecord]) -> JobInfo:
    """Return the job with a comment that lists the nodes its run has left, as far as they need repair (`wanted`)."""
    record = runs.get(job.name)
    here = frozenset(wanted) & set(job.nodes)
    comment = read_comment(job.comment)
    if not here or not record or comment is None or comment.left or not is_active(job):
        return job
    status = read_hint(RunFolder(Path(record.folder)).status, record.uid)
    if status is None or not status.nodes:  # a run of srun tasks lists no nodes and needs all of them
        return job
    if status.phase is not RunPhase.RUNNING or job.id not in status.jobs or job.uid != record.uid:
        return job
    left = here - {node.name for node in status.nodes}
    return replace(job, comment=left_comment(comment.role, left))


def read_hint(path: Path, uid: int) -> RunStatus | None:
    """Read a user's status file as root. Return None if it is not a valid regular file that the user owns."""
    try:
        with open(open_owned(path, uid), "rb") as file:
            value = json.loads(file.read(MAX_BYTES))
        return status_from_json(value) if isinstance(value, dict) else None
    except (OSError, ValueError, RecursionError, TypeError, DalsegnoError):
        return None


# Recorded changes of check results


MAX_RECORDS, CALM_S = 4, 120.0  # at most 4 records of one check in 120 s, because some checks alternate between results
_RECORDED = (Verdict.PASSED, Verdict.WARNED, Verdict.FAILED)  # an unknown result says nothing about the node

State = tuple[Verdict, "str | None"]  # the verdict, and the code of the failure; None: not recorded


@dataclass(frozen=True)
class CheckChange:
    node: str
    check: str
    verdict: Verdict
    text: str


@dataclass
class CheckChanges:
    """Remembers the last recorded state of each check on each node."""

    _recorded: dict[tuple[str, str], tuple[State, tuple[float, ...]]] = field(default_factory=dict)

    @classmethod
    def after(cls, recorded: Iterable[tuple[str, str, Verdict]]) -> CheckChanges:
        """Return an instance that starts from the verdicts that the last controller recorded, by node and check."""
        return cls({(node, check): ((verdict, None), ()) for node, check, verdict in recorded})

    def update(self, node: str, findings: Iterable[Finding], now: float) -> list[CheckChange]:
        return [news for each in findings if (news := self._update_check(node, each, now))]

    def _update_check(self, node: str, finding: Finding, now: float) -> CheckChange | None:
        result, key = finding.result, (node, finding.check)
        if result.verdict not in _RECORDED:
            return None
        before, times = self._recorded.get(key, ((Verdict.PASSED, ""), ()))
        state = (result.verdict, result.code if result.verdict is Verdict.FAILED else "")
        lately = tuple(at for at in times if now - at < CALM_S)
        if before[1] is None and before[0] is state[0]:
            before = state  # the last controller recorded the verdict without the code
            self._recorded[key] = (state, times)
        if state == before or len(lately) >= MAX_RECORDS:
            return None
        self._recorded[key] = (state, (*lately, now))
        return CheckChange(node, finding.check, result.verdict, result.text)
