"""Doing one action. Each may be done twice: what is so already is fine, and nothing of someone else's is touched."""

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
from dalsegno.recovery.actions import (
    Action,
    CloseLoan,
    Drain,
    Expedite,
    Hold,
    Mend,
    Recall,
    Release,
    Requeue,
    Return,
    SetDown,
    TakeEvidence,
    Validate,
)
from dalsegno.recovery.agent_view import AgentView
from dalsegno.recovery.evidence import INCOMPLETE, put_together, save_evidence, says_nothing
from dalsegno.recovery.facts import Validation
from dalsegno.recovery.reason import SLURM_USERS, Owner, owner, write_reason
from dalsegno.slurm.facts import JobInfo, JobState, NodeInfo
from dalsegno.slurm.parse.jobs import JobList
from dalsegno.slurm.render import SPARE_REASON
from dalsegno.targets.base import CanReboot, CanReplace, CanReset, CanTell

# ---- What recovery needs of the world, each as a Protocol. The real ones are Slurm's client, the link to the node
# agents and a target; fakes of all three are in `fakes`.


class SlurmActions(Protocol):
    """What `SlurmClient` does of it."""

    def nodes(self, names: str | Iterable[str] = ()) -> list[NodeInfo]: ...

    def queue(self, *, ended: bool = False) -> JobList: ...

    def jobs(self, *, ended: bool = False) -> list[JobInfo]: ...

    def drain(self, nodes: str | Iterable[str], reason: str) -> None: ...

    def set_down(self, nodes: str | Iterable[str], reason: str) -> None: ...

    def resume(self, nodes: str | Iterable[str]) -> None: ...

    def requeue(self, *jobs: int | str) -> None: ...

    def update(self, **settings: str) -> None: ...

    def scontrol(self, *words: str) -> str: ...


class NodeAgents(Protocol):
    """The node agents, as their link knows them. None of these waits for long."""

    def remember(self, nodes: Iterable[str]) -> None:
        """Nodes that were in service when the controller before this one ended: they are missed sooner."""
        ...

    def views(self) -> Mapping[str, AgentView]: ...

    def validations(self) -> Mapping[str, Validation]:
        """The last answer of each node to `validate`."""
        ...

    def validating(self) -> Mapping[str, str]:
        """Nodes that are at it, and which order each carries out."""
        ...

    def validate(self, node: str, ask: str, partner: str) -> None:
        """Tell a node to prove itself; its answer carries `ask`. Told again with the same, it does not start anew."""
        ...

    def rest(self, node: str, seconds: float) -> None:
        """Have an agent let go of its GPUs for so long: they cannot be reset while it holds them. 0: no longer."""
        ...

    def evidence(self, node: str) -> Mapping[str, str]:
        """What a node can tell of its last hours, as files; of one that cannot speak any more, only why. This one may
        wait."""
        ...


# ---- Reservations of Slurm that keep a lent spare for the user it is lent to.


# FLEX: a job may run for longer than the reservation lasts. IGNORE_JOBS: what still ends on the node does not matter.
_FLAGS = "FLEX,IGNORE_JOBS,PURGE_COMP=00:05:00"


def loan_name(node: str) -> str:
    """Return the name of the reservation for a node."""
    return f"dalsegno-lent-{node}"


def reserve(slurm: SlurmActions, node: str, uid: int) -> bool:
    """Keep a node for a user, also where a controller before us had begun to; False if Slurm refuses."""
    name = loan_name(node)
    with contextlib.suppress(CommandFailed):
        slurm.update(ReservationName=name, Users=str(uid))
        return True
    with contextlib.suppress(CommandFailed):
        words = {"ReservationName": name, "Users": uid, "Nodes": node, "StartTime": "now", "Duration": "UNLIMITED"}
        slurm.scontrol("create", "reservation", *(f"{key}={value}" for key, value in words.items()), f"Flags={_FLAGS}")
        return True
    return False


def close_loan(slurm: SlurmActions, node: str) -> None:
    """Let no further job start on a lent node; none of the reservation's own runs or waits is touched."""
    with contextlib.suppress(CommandFailed):  # Slurm had refused it, or has removed it
        slurm.update(ReservationName=loan_name(node), Users="root")


def end_loan(slurm: SlurmActions, node: str) -> None:
    """Remove the reservation; gone already is fine."""
    with contextlib.suppress(CommandFailed):
        slurm.scontrol("delete", f"ReservationName={loan_name(node)}")


# ---- Doing one action. Each may be done twice: what is so already is fine, and nothing of someone else's is
# touched.


@dataclass(frozen=True)
class Hands:
    """Whom actions are done with. `target` is any target; what it can do, its type tells."""

    slurm: SlurmActions
    agents: NodeAgents
    target: object
    evidence: Path  # a folder
    slurm_users: frozenset[str] = SLURM_USERS


def remedies_of(target: object) -> frozenset[Remedy]:
    """What a target can do for a node."""
    able = {Remedy.RESET: CanReset, Remedy.REBOOT: CanReboot, Remedy.REPLACE: CanReplace}
    return frozenset(remedy for remedy, kind in able.items() if isinstance(target, kind))


def do(action: Action, id: str, at: float, hands: Hands) -> str:
    """Do what was begun then, and tell of it in a line. Fails with a DalsegnoError."""
    if isinstance(action, Drain):
        _ours_or_nobodys(hands, action.node)
        hands.slurm.drain(action.node, write_reason(action.fault))
        return f"drained: {action.fault.words}"
    if isinstance(action, SetDown):
        _ours_or_nobodys(hands, action.node)
        hands.slurm.set_down(action.node, write_reason(action.fault))
        return f"set down: {action.fault.text}"
    if isinstance(action, TakeEvidence):
        return f"evidence saved: {_take_evidence(action, id, at, hands)}"
    if isinstance(action, Mend):
        return _mend(action, hands)
    if isinstance(action, Validate):
        hands.agents.validate(action.node, id, action.partner)
        return "is being validated" + (f" together with {action.partner}" if action.partner else "")
    return _for_jobs_and_spares(action, hands)


def _shown(proof: str) -> str:
    return f" ({proof})" if proof else ""


def _for_jobs_and_spares(action: Action, hands: Hands) -> str:
    if isinstance(action, Return):
        _ours_or_nobodys(hands, action.node)
        hands.slurm.resume(action.node)
        return f"{'validated, and back' if action.tried else 'back'} in service{_shown(action.proof)}"
    if isinstance(action, Hold):
        if _ours_or_nobodys(hands, action.node).down:
            hands.slurm.resume(action.node)
        hands.slurm.drain(action.node, SPARE_REASON)
        end_loan(hands.slurm, action.node)
        return f"validated, and a spare{_shown(action.proof)}"
    if isinstance(action, Release):
        return _release(action, hands)
    if isinstance(action, CloseLoan):
        close_loan(hands.slurm, action.node)
        return "has the job it was lent to, and takes no other"
    if isinstance(action, Recall):
        return _recall(action, hands)
    if isinstance(action, Requeue):
        hands.slurm.requeue(action.job)
        return f"job {action.job} is requeued: it cannot go on here"
    if isinstance(action, Expedite):
        hands.slurm.update(JobId=str(action.job), StartTime="now")
        return f"job {action.job} was requeued by Slurm, and is told to start without the wait"
    raise TypeError(f"nothing to do for {action!r}")


def _ours_or_nobodys(hands: Hands, node: str) -> NodeInfo:
    """Looked at again just before: someone may have taken it since we decided."""
    found = [each for each in hands.slurm.nodes(node) if each.name == node]
    if not found:
        raise DalsegnoError(f"Slurm knows no node {node} any more", hint="`dalsegno up` puts it back")
    if owner(found[0], hands.slurm_users) is Owner.SOMEONE:
        raise DalsegnoError(
            f"someone else keeps {node} out of service: {found[0].reason or found[0].state_text}",
            hint=f"`scontrol update node={node} state=resume` gives it back",
        )
    return found[0]


def _mend(action: Mend, hands: Hands) -> str:
    words: dict[Remedy, Callable[[], tuple[Callable[[str], None], str] | None]] = {
        Remedy.RESET: lambda: (
            (lambda node: _reset(node, hands), "its GPUs are reset") if isinstance(hands.target, CanReset) else None
        ),
        Remedy.REBOOT: lambda: (hands.target.reboot, "is rebooted") if isinstance(hands.target, CanReboot) else None,
        Remedy.REPLACE: lambda: (hands.target.replace, "is replaced") if isinstance(hands.target, CanReplace) else None,
    }
    found = words[action.how]()
    if found is None:
        raise DalsegnoError(
            f"this cluster's machines cannot be {action.how.value} from here", hint="mend it by hand, then resume it"
        )
    call, said = found
    call(action.node)
    return said


def _reset(node: str, hands: Hands) -> None:
    """The agent looks again as soon as it is done: what it found before is no longer so."""
    assert isinstance(hands.target, CanReset)
    hands.agents.rest(node, MOST_RESET_S)
    try:
        hands.target.reset_gpus(node)
    finally:
        hands.agents.rest(node, 0.0)


def _release(action: Release, hands: Hands) -> str:
    """The job gets this node, and goes before all others: they would take it first."""
    _ours_or_nobodys(hands, action.node)
    if any(job.id == action.job and job.state is JobState.RUNNING for job in hands.slurm.jobs()):
        hands.slurm.resume(action.node)
        return f"is given back to job {action.job}: Slurm had drained it again"
    reserved = reserve(hands.slurm, action.node, action.uid)
    loan = {"ReservationName": loan_name(action.node)} if reserved else {}
    hands.slurm.update(JobId=str(action.job), ReqNodeList=action.node, Priority=HIGHEST, **loan)
    hands.slurm.resume(action.node)
    return f"is released for job {action.job}" + ("" if reserved else "; Slurm refused to reserve it for its user")


def _recall(action: Recall, hands: Hands) -> str:
    _ours_or_nobodys(hands, action.node)
    hands.slurm.drain(action.node, SPARE_REASON)
    with contextlib.suppress(CommandFailed):  # it is over
        hands.slurm.update(JobId=str(action.job), ReqNodeList="", ReservationName="")
    end_loan(hands.slurm, action.node)
    return f"is taken back: job {action.job} did not start on it"


MOST_RESET_S = 120.0  # the agent looks again by itself after that
HIGHEST = str(2**32 - 3)  # the two above mean something else


def _take_evidence(action: TakeEvidence, id: str, at: float, hands: Hands) -> str:
    """Its report, what Slurm knows of it and its jobs, and what the node itself can still tell."""
    node = action.node
    view = hands.agents.views().get(node)
    report = report_message(view.report) if view and view.report else None
    jobs = [job for job in hands.slurm.jobs(ended=True) if node in job.nodes or job.id in action.jobs]
    told = [f"{job.label} {job.user} {job.name} {job.state.value} {','.join(job.nodes)}" for job in jobs]
    own = {
        "report.json": json.dumps(report, indent=1),
        "slurm.txt": hands.slurm.scontrol("show", "node", node),
        "jobs.txt": "".join(f"{one_line(text)}\n" for text in told),  # names are their users' text
    }
    found = hands.agents.evidence(node)
    instead = _last_words(node, hands) if says_nothing(found) else {}
    return str(save_evidence(hands.evidence, node, put_together(found, instead, own), at, id))


def _last_words(node: str, hands: Hands) -> Mapping[str, str]:
    """Of one that cannot speak any more, from whoever keeps its machine. Better less evidence than none."""
    if not isinstance(hands.target, CanTell):
        return {INCOMPLETE: "its machine: nobody here can tell of one that does not speak itself"}
    try:
        return hands.target.last_words(node) or {INCOMPLETE: "its machine: nothing is known of it"}
    except (DalsegnoError, OSError) as error:
        return {INCOMPLETE: f"its machine: {error}"}
