"""Carry out recovery actions. Actions are idempotent.

An action that changes a node's state in Slurm fails if an administrator has drained the node.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dalsegno.errors import CommandFailed, DalsegnoError
from dalsegno.health import Remedy, report_message
from dalsegno.printable import one_line
from dalsegno.recovery.agents.view import AgentView
from dalsegno.recovery.decisions.actions import (
    Action,
    CloseLoan,
    Drain,
    Expedite,
    Hold,
    Promote,
    Recall,
    Release,
    Repair,
    Requeue,
    Return,
    SetDown,
    TakeEvidence,
    Validate,
)
from dalsegno.recovery.decisions.facts import Validation
from dalsegno.recovery.decisions.reason import SLURM_USERS, Owner, find_owner, write_reason
from dalsegno.recovery.journal.evidence import INCOMPLETE, is_empty, merge_evidence, save_evidence
from dalsegno.slurm.facts import JobInfo, JobState, NodeInfo
from dalsegno.slurm.parse.jobs import JobList
from dalsegno.slurm.render import SPARE_REASON
from dalsegno.targets.base import CanReadLogs, CanReboot, CanReplace, CanReset

# The interfaces that recovery depends on, implemented by Slurm's client, the link to the node agents and a target.
# Fakes of all three are in `fakes`.


class SlurmActions(Protocol):
    """The part of `SlurmClient` that recovery uses."""

    def nodes(self, names: str | Iterable[str] = ()) -> list[NodeInfo]: ...

    def queue(self, *, ended: bool = False) -> JobList: ...

    def jobs(self, *, ended: bool = False) -> list[JobInfo]: ...

    def drain(self, nodes: str | Iterable[str], reason: str) -> None: ...

    def set_down(self, nodes: str | Iterable[str], reason: str) -> None: ...

    def resume(self, nodes: str | Iterable[str]) -> None: ...

    def requeue(self, *jobs: int | str) -> None: ...

    def update(self, **settings: str) -> None: ...

    def scontrol(self, *args: str) -> str: ...


class NodeAgents(Protocol):
    """The controller's interface to the node agents. Methods return at once unless their docstring says otherwise."""

    def remember(self, nodes: Iterable[str]) -> None:
        """Record the nodes that were in service before the controller restarted. Their loss is then detected sooner."""
        ...

    def see(self, nodes: Iterable[NodeInfo]) -> None:
        """Receive Slurm's latest answer about all nodes, once per round. Only `SlurmLossDetector` uses it."""
        ...

    def views(self) -> Mapping[str, AgentView]: ...

    def validations(self) -> Mapping[str, Validation]:
        """Return the last validation result of each node."""
        ...

    def validating(self) -> Mapping[str, str]:
        """Return the id of the validation in progress, by node."""
        ...

    def validate(self, node: str, ask: str, partner: str) -> None:
        """Order a node to validate itself. `ask` is the id of the validation: a repeated order does not restart it."""
        ...

    def rest(self, node: str, seconds: float) -> None:
        """Make an agent release its GPUs for `seconds`, because GPUs in use cannot be reset. 0 ends the pause.

        Can block until the agent answers.
        """
        ...

    def evidence(self, node: str) -> Mapping[str, str]:
        """Return a node's evidence as files by name, or one file that says why there is none. Can block."""
        ...


# Reservations that keep a lent spare for one user


# FLEX: a job in the reservation may also use other nodes. IGNORE_JOBS: running jobs do not prevent the reservation.
# PURGE_COMP: Slurm deletes the reservation after five minutes without a job.
_FLAGS = "FLEX,IGNORE_JOBS,PURGE_COMP=00:05:00"


def loan_name(node: str) -> str:
    """Return the name of the reservation for a node."""
    return f"dalsegno-lent-{node}"


def reserve(slurm: SlurmActions, node: str, uid: int) -> bool:
    """Reserve a node for a user, or change its existing reservation. Return False if Slurm refuses."""
    name = loan_name(node)
    with contextlib.suppress(CommandFailed):
        slurm.update(ReservationName=name, Users=str(uid))
        return True
    with contextlib.suppress(CommandFailed):
        settings = {"ReservationName": name, "Users": uid, "Nodes": node, "StartTime": "now", "Duration": "UNLIMITED"}
        slurm.scontrol(
            "create", "reservation", *(f"{key}={value}" for key, value in settings.items()), f"Flags={_FLAGS}"
        )
        return True
    return False


def close_loan(slurm: SlurmActions, node: str) -> None:
    """Prevent further jobs from starting on a lent node. Jobs in the reservation that run or wait are not affected."""
    with contextlib.suppress(CommandFailed):  # there is no reservation: Slurm refused it or has removed it
        slurm.update(ReservationName=loan_name(node), Users="root")


def end_loan(slurm: SlurmActions, node: str) -> None:
    """Delete the reservation, if there is one."""
    with contextlib.suppress(CommandFailed):
        slurm.scontrol("delete", f"ReservationName={loan_name(node)}")


@dataclass(frozen=True)
class ActionContext:
    """The interfaces that actions use. The type of `target` determines which repairs it supports."""

    slurm: SlurmActions
    agents: NodeAgents
    target: object
    evidence: Path  # folder in which evidence about nodes is saved
    slurm_users: frozenset[str] = SLURM_USERS


def remedies_of(target: object) -> frozenset[Remedy]:
    """Return the remedies that a target supports."""
    able = {Remedy.RESET: CanReset, Remedy.REBOOT: CanReboot, Remedy.REPLACE: CanReplace}
    return frozenset(remedy for remedy, kind in able.items() if isinstance(target, kind))


def do(action: Action, id: str, at: float, context: ActionContext) -> str:
    """Carry out an action that began at `at` and return one line for the journal. Raise DalsegnoError if it fails."""
    if isinstance(action, Drain):
        _check_not_taken(context, action.node)
        context.slurm.drain(action.node, write_reason(action.fault))
        return f"drained: {action.fault.summary}"
    if isinstance(action, SetDown):
        _check_not_taken(context, action.node)
        context.slurm.set_down(action.node, write_reason(action.fault))
        return f"set down: {action.fault.text}"
    if isinstance(action, TakeEvidence):
        return f"evidence saved: {_take_evidence(action, id, at, context)}"
    if isinstance(action, Repair):
        return _repair(action, context)
    if isinstance(action, Validate):
        context.agents.validate(action.node, id, action.partner)
        return "validation started" + (f" with partner {action.partner}" if action.partner else "")
    return _do_for_jobs_and_spares(action, context)


def _in_parentheses(proof: str) -> str:
    return f" ({proof})" if proof else ""


def _do_for_jobs_and_spares(action: Action, context: ActionContext) -> str:
    if isinstance(action, Return):
        _check_not_taken(context, action.node)
        context.slurm.resume(action.node)
        return f"{'validated, and back' if action.tried else 'back'} in service{_in_parentheses(action.proof)}"
    if isinstance(action, Hold):
        if _check_not_taken(context, action.node).down:
            context.slurm.resume(action.node)
        context.slurm.drain(action.node, SPARE_REASON)
        end_loan(context.slurm, action.node)
        return f"validated, now a spare{_in_parentheses(action.proof)}"
    if isinstance(action, Release):
        return _release(action, context)
    if isinstance(action, Promote):
        _check_not_taken(context, action.node)
        context.slurm.resume(action.node)
        return f"in service in place of {action.place}: a person must replace {action.machine}"
    if isinstance(action, CloseLoan):
        close_loan(context.slurm, action.node)
        return "runs the job it was lent to; closed to other jobs"
    if isinstance(action, Recall):
        return _recall(action, context)
    if isinstance(action, Requeue):
        context.slurm.requeue(action.job)
        return f"job {action.job} requeued: it cannot continue on this node"
    if isinstance(action, Expedite):
        context.slurm.update(JobId=str(action.job), StartTime="now")
        return f"job {action.job} was requeued by Slurm; its start delay is removed"
    raise TypeError(f"unknown action {action!r}")


def _check_not_taken(context: ActionContext, node: str) -> NodeInfo:
    """Return the node as Slurm shows it. Raise an error if an administrator has drained it since the decision."""
    found = [each for each in context.slurm.nodes(node) if each.name == node]
    if not found:
        raise DalsegnoError(f"Slurm no longer has node {node}", hint="`dalsegno up` adds it again")
    if find_owner(found[0], context.slurm_users) is Owner.SOMEONE:
        raise DalsegnoError(
            f"an administrator keeps {node} out of service: {found[0].reason or found[0].state_text}",
            hint=f"`scontrol update node={node} state=resume` returns it to service",
        )
    return found[0]


def _repair(action: Repair, context: ActionContext) -> str:
    repairs: dict[Remedy, Callable[[], tuple[Callable[[str], None], str] | None]] = {
        Remedy.RESET: lambda: (
            (lambda node: _reset(node, context), "GPUs reset") if isinstance(context.target, CanReset) else None
        ),
        Remedy.REBOOT: lambda: (context.target.reboot, "rebooted") if isinstance(context.target, CanReboot) else None,
        Remedy.REPLACE: lambda: (
            (context.target.replace, "replaced") if isinstance(context.target, CanReplace) else None
        ),
    }
    found = repairs[action.how]()
    if found is None:
        raise DalsegnoError(
            f"this cluster cannot {action.how.value} its machines", hint="repair it by hand, then resume it"
        )
    call, text = found
    call(action.node)
    return text


def _reset(node: str, context: ActionContext) -> None:
    """Reset a node's GPUs while its agent has released them.

    Afterwards the agent repeats the checks, because the reset can change their results.
    """
    assert isinstance(context.target, CanReset)
    context.agents.rest(node, MAX_RESET_S)
    try:
        context.target.reset_gpus(node)
    finally:
        context.agents.rest(node, 0.0)


def _release(action: Release, context: ActionContext) -> str:
    """Release a spare for a job, and return a line for the journal.

    The job gets the highest priority: otherwise another job could take the node. If the job already runs there, only
    resume the node, and keep it closed to other jobs.
    """
    _check_not_taken(context, action.node)
    if any(job.id == action.job and job.state is JobState.RUNNING for job in context.slurm.jobs()):
        reserve(context.slurm, action.node, 0)  # repeated: a slurmctld that was killed may have lost the reservation
        context.slurm.resume(action.node)
        return f"given back to job {action.job}: Slurm had drained it again"
    reserved = reserve(context.slurm, action.node, action.uid)
    loan = {"ReservationName": loan_name(action.node)} if reserved else {}
    context.slurm.update(JobId=str(action.job), ReqNodeList=action.node, Priority=HIGHEST, **loan)
    context.slurm.resume(action.node)
    return f"released for job {action.job}" + ("" if reserved else "; Slurm refused to reserve it for the job's user")


def _recall(action: Recall, context: ActionContext) -> str:
    _check_not_taken(context, action.node)
    context.slurm.drain(action.node, SPARE_REASON)
    with contextlib.suppress(CommandFailed):  # the job may have ended
        context.slurm.update(JobId=str(action.job), ReqNodeList="", ReservationName="")
    end_loan(context.slurm, action.node)
    return f"taken back: job {action.job} did not start on it"


MAX_RESET_S = 120.0  # after this time the agent resumes its checks by itself
HIGHEST = str(2**32 - 3)  # the highest priority of a job; Slurm reserves the two higher values, NO_VAL and INFINITE


def _take_evidence(action: TakeEvidence, id: str, at: float, context: ActionContext) -> str:
    """Save the node's report, what Slurm shows about the node and its jobs, and the files that its agent sends.

    If the agent sends none, save the target's logs of the node instead. Return the folder.
    """
    node = action.node
    view = context.agents.views().get(node)
    report = report_message(view.report) if view and view.report else None
    jobs = [job for job in context.slurm.jobs(ended=True) if node in job.nodes or job.id in action.jobs]
    lines = [f"{job.label} {job.user} {job.name} {job.state.value} {','.join(job.nodes)}" for job in jobs]
    own = {
        "report.json": json.dumps(report, indent=1),
        "slurm.txt": context.slurm.scontrol("show", "node", node),
        "jobs.txt": "".join(f"{one_line(text)}\n" for text in lines),  # job names are user input
    }
    found = context.agents.evidence(node)
    instead = _read_logs(node, context) if is_empty(found) else {}
    return str(save_evidence(context.evidence, node, merge_evidence(found, instead, own), at, id))


def _read_logs(node: str, context: ActionContext) -> Mapping[str, str]:
    """Return the target's logs of a node whose agent sent no evidence.

    If there are none, return a note that says why.
    """
    if not isinstance(context.target, CanReadLogs):
        return {INCOMPLETE: "machine: this target keeps no logs of a node that does not answer"}
    try:
        return context.target.read_logs(node) or {INCOMPLETE: "machine: the target has no logs of it"}
    except (DalsegnoError, OSError) as error:
        return {INCOMPLETE: f"machine: {error}"}
