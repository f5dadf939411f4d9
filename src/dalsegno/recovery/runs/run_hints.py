"""The reports of runs about nodes: which nodes they have left, and which nodes compute wrongly.

The comment of a run's job lists the nodes that the run has left. Without accounting, Slurm 22.05 refuses every change
to a job that has lost a node ("the DB index is being set"), so the list is also read from the run's status file. The
run's owner can change this file, so it counts only for jobs of the same owner.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health import Finding, Verdict
from dalsegno.printable import one_line
from dalsegno.recovery.decisions.facts import Facts, is_active
from dalsegno.recovery.runs.run_records import RunRecord
from dalsegno.runs.comment import left_comment, read_comment
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.status import RunPhase, RunStatus, status_from_json
from dalsegno.slurm.facts import JobInfo
from dalsegno.system.ownership import open_owned

MAX_BYTES = 1 << 20


def with_hint(job: JobInfo, wanted: Collection[str], runs: Mapping[str, RunRecord]) -> JobInfo:
    """Return the job with a comment that lists the nodes its run has left. Only nodes in `wanted`, which are to be
    repaired, are listed."""
    record = runs.get(job.name)
    here = frozenset(wanted) & set(job.nodes)
    comment = read_comment(job.comment)
    if not here or not record or comment is None or comment.left or not is_active(job):
        return job
    status = read_hint(RunFolder(Path(record.folder)).status, record.uid)
    if status is None or not status.nodes:  # a run of srun tasks lists no nodes and needs all nodes of its job
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


# Nodes that a run reports for wrong results


REPORT_VALID_S = 60.0  # how long a report counts, which is enough for a round of recovery
# maximum number of nodes that are drained in a day because the runs of one user have reported them
MAX_REPORTED_A_DAY = 1
MAX_NODE_NAME = 255
MAX_EVIDENCE = 300  # maximum characters of the evidence
DAY_S = 86400.0


@dataclass(frozen=True)
class WrongResultReport:
    """A run's report that a node computes wrongly. Only the owner of a run can report it, for nodes of its own jobs."""

    run: str
    uid: int
    node: str
    text: str
    at: float


class WrongResultReports:
    """The reports of all runs about nodes that compute wrongly. May be used from any thread."""

    def __init__(self, runs: Callable[[], Mapping[str, RunRecord]], clock: Callable[[], float] = time.time) -> None:
        self._runs, self._clock, self._all = runs, clock, tuple[WrongResultReport, ...]()

    def add(self, uid: int, request: object) -> bool:
        """Add the report of a user's run; return False if the run has already reported this node within a day.

        Raise DalsegnoError if the run belongs to another user, or the user has reported too many nodes.
        """
        words = request if isinstance(request, dict) else {}
        run, node, text = (words.get(name) for name in ("run", "node", "text"))
        if not (isinstance(run, str) and isinstance(node, str) and isinstance(text, str)):
            raise DalsegnoError("`corrupt` needs `run`, `node` and `text`", hint="send all three as strings")
        record, now = self._runs().get(run), self._clock()
        if record is None or record.uid != uid:
            raise DalsegnoError(f"you have no run {run!r:.80}", hint="`dalsegno runs` lists yours")
        if len(node) > MAX_NODE_NAME:
            raise DalsegnoError(f"{node!r:.80} is not the name of a node", hint="`dalsegno nodes` lists the nodes")
        kept = [each for each in self._all if now - each.at < DAY_S]
        if any((each.uid, each.run, each.node) == (uid, run, node) for each in kept):
            return False
        if len({each.node for each in kept if each.uid == uid} | {node}) > MAX_REPORTED_A_DAY:
            what = f"runs of one user can have {MAX_REPORTED_A_DAY} node a day drained for wrong results"
            raise DalsegnoError(what, hint=f"an administrator can drain {node:.80} with scontrol")
        self._all = (*kept, WrongResultReport(run, uid, node, one_line(text)[:MAX_EVIDENCE], now))
        return True

    def add_to(self, facts: Facts) -> Facts:
        """Return the facts with the current reports. A report counts only if its run has a job on the node."""
        now = self._clock()
        new = [each for each in self._all if now - each.at < REPORT_VALID_S]
        nodes = dict(facts.nodes or {})
        for each in new:
            node = nodes.get(each.node)
            if node is None or node.reported_by_owner or f"{each.uid}:{each.run}" not in facts.runs_on(node):
                continue
            is_owner = each.uid in (0, os.geteuid())
            nodes[each.node] = replace(node, wrong_result=each.text, reported_by_owner=is_owner)
        return replace(facts, nodes=nodes) if new and facts.nodes is not None else facts


# Recorded changes of check results


MAX_RECORDS, CALM_S = 4, 120.0  # at most 4 records of one check in 120 s, because some checks alternate between results
_RECORDED = (Verdict.PASSED, Verdict.WARNED, Verdict.FAILED)  # an unknown result says nothing about the node

State = tuple[Verdict, "str | None"]  # the verdict, and the code of its failure; None if the code was not recorded


@dataclass(frozen=True)
class CheckChange:
    node: str
    check: str
    verdict: Verdict
    text: str


_PASSED: State = (Verdict.PASSED, "")


def _state(finding: Finding) -> State:
    result = finding.result
    return result.verdict, result.code if result.verdict is Verdict.FAILED else ""


@dataclass
class CheckChanges:
    """Remembers the last recorded state of each check on each node."""

    _recorded: dict[tuple[str, str], tuple[State, tuple[float, ...]]] = field(default_factory=dict)
    _seen: dict[str, Iterable[Finding]] = field(default_factory=dict)  # node -> findings that are all recorded

    @classmethod
    def after(cls, recorded: Iterable[tuple[str, str, Verdict]]) -> CheckChanges:
        """Return an instance that starts from the verdicts that the last controller recorded, by node and check."""
        return cls({(node, check): ((verdict, None), ()) for node, check, verdict in recorded})

    def update(self, node: str, findings: Iterable[Finding], now: float) -> list[CheckChange]:
        """Return the changes since the last call. Findings that are all recorded are not compared again."""
        if self._seen.get(node) is findings:
            return []
        changes = [change for each in findings if (change := self._update_check(node, each, now))]
        if all(self._is_recorded(node, each) for each in findings):
            self._seen[node] = findings
        return changes

    def _is_recorded(self, node: str, finding: Finding) -> bool:
        """Return whether nothing is left to record now. The change of a check that changes too often is recorded
        later."""
        state, _ = self._recorded.get((node, finding.check), (_PASSED, ()))
        return finding.result.verdict not in _RECORDED or state == _state(finding)

    def _update_check(self, node: str, finding: Finding, now: float) -> CheckChange | None:
        result, key = finding.result, (node, finding.check)
        if result.verdict not in _RECORDED:
            return None
        before, times = self._recorded.get(key, (_PASSED, ()))
        state = _state(finding)
        lately = tuple(at for at in times if now - at < CALM_S)
        if before[1] is None and before[0] is state[0]:
            before = state  # the previous controller recorded this verdict, but not its code
            self._recorded[key] = (state, times)
        if state == before or len(lately) >= MAX_RECORDS:
            return None
        self._recorded[key] = (state, (*lately, now))
        return CheckChange(node, finding.check, result.verdict, result.text)
