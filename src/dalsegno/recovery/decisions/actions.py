"""Recovery actions as values. `touches` is false for actions that change only the controller's own records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dalsegno.health import Remedy
from dalsegno.recovery.decisions.facts import NodeFault
from dalsegno.recovery.decisions.phase import HeldAction, NodePhase
from dalsegno.recovery.decisions.reason import ANYTHING, Subject
from dalsegno.recovery.journal.event import EventKind, EventStage
from dalsegno.slurm.parse.messages import SlurmRefusal, parse_refusal


@dataclass(frozen=True)
class Action:
    node: str
    touches: ClassVar[bool] = True
    slow: ClassVar[bool] = False  # whether the action is carried out in a background thread

    @property
    def kind(self) -> EventKind:
        return EventKind(type(self).__name__.lower())

    @property
    def summary(self) -> str:
        return type(self).__name__.lower()

    @property
    def concerns(self) -> tuple[int, ...]:
        """Return the jobs that the action's events mention."""
        return ()

    @property
    def stage(self) -> EventStage:
        """Return the event stage of an action that is only recorded, such as a note."""
        return EventStage.INFO

    def failure(self, error: str) -> str:
        """Return the event text for a failed action."""
        return f"could not {self.summary}: {error}"


@dataclass(frozen=True)
class Drain(Action):
    """Drain the node: no new job starts there. `held` are the node's jobs, `runs` the runs of these jobs."""

    fault: NodeFault
    held: tuple[int, ...] = ()
    runs: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        return f"drain it: {self.fault.summary}"


@dataclass(frozen=True)
class SetDown(Action):
    """Set the node down, so that Slurm removes it from its jobs at once. `jobs` are its jobs that belong to no run."""

    fault: NodeFault
    jobs: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    runs: tuple[str, ...] = ()
    heard_at: float = 0.0  # time of the last message from a lost node; 0: unknown

    @property
    def summary(self) -> str:
        return f"set it down: {self.fault.text}"


@dataclass(frozen=True)
class TakeEvidence(Action):
    """Save evidence before a repair destroys it. `jobs` were on the node when it was taken out of service."""

    jobs: tuple[int, ...] = ()
    slow: ClassVar[bool] = True

    @property
    def kind(self) -> EventKind:
        return EventKind.EVIDENCE

    @property
    def summary(self) -> str:
        return "save the evidence"


@dataclass(frozen=True)
class Repair(Action):
    """Reset the node's GPUs, or reboot or replace it. `boot` is its boot id before the repair, `gpus` its GPUs' ids."""

    how: Remedy
    fault: NodeFault
    boot: str = ""
    gpus: tuple[str, ...] = ()
    why: str = ""  # why a lighter repair is not possible
    slow: ClassVar[bool] = True

    @property
    def kind(self) -> EventKind:
        return EventKind(self.how.value)

    @property
    def summary(self) -> str:
        return f"{self.how.value} it: {self.fault.summary}" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True)
class Validate(Action):
    """Order the node to validate itself, alone and, if a partner is given, with the partner."""

    partner: str = ""
    boot: str = ""

    @property
    def summary(self) -> str:
        return "validate it" + (f" with partner {self.partner}" if self.partner else "")


@dataclass(frozen=True)
class Return(Action):
    """Return the node to service. `proof` is the result of the node's validation or, if it was not validated, the
    reason for its return."""

    proof: str = ""
    tried: bool = True

    @property
    def summary(self) -> str:
        return "return it to service"


@dataclass(frozen=True)
class Hold(Action):
    """Keep the node as a spare. `proof` is the result of its validation."""

    proof: str = ""

    @property
    def summary(self) -> str:
        return "keep it as a spare"


@dataclass(frozen=True)
class Release(Action):
    """Release a spare for a job that adds a node to a run. `run` is "" if the spare is already lent to the job."""

    job: int
    run: str = ""
    uid: int = 0  # owner of the job

    @property
    def concerns(self) -> tuple[int, ...]:
        return (self.job,)

    @property
    def summary(self) -> str:
        return f"release it for job {self.job}"


@dataclass(frozen=True)
class Promote(Action):
    """Put a spare into service in place of a node that automation cannot repair. `place` is the name of that node, and
    `machine` describes its machine, which an administrator must replace."""

    place: str
    machine: str = ""

    @property
    def summary(self) -> str:
        return f"put it into service in place of {self.place}"


@dataclass(frozen=True)
class CloseLoan(Action):
    """Close a lent spare to further jobs, because the job for which it was lent runs there."""

    @property
    def summary(self) -> str:
        return "close it to other jobs"


@dataclass(frozen=True)
class Recall(Action):
    """Take a spare back from a job that does not start on it. The run may be lent another spare."""

    job: int
    run: str = ""

    @property
    def concerns(self) -> tuple[int, ...]:
        return (self.job,)

    @property
    def summary(self) -> str:
        return f"take it back from job {self.job}"


@dataclass(frozen=True)
class Requeue(Action):
    """Requeue a job that cannot continue on the node. A job that may not be requeued is left alone."""

    job: int

    @property
    def concerns(self) -> tuple[int, ...]:
        return (self.job,)

    def failure(self, error: str) -> str:
        if parse_refusal(error) is SlurmRefusal.REQUEUE_DISABLED:
            return f"job {self.job} cannot continue here but may not be requeued: waiting until it ends"
        return super().failure(error)

    @property
    def summary(self) -> str:
        return f"requeue job {self.job}"


@dataclass(frozen=True)
class Expedite(Action):
    """Start a job without Slurm's two-minute delay after a requeue.

    The job may start on any node in service, including the one that it lost: once repaired and validated, that node is
    as good as any other, and a job that requires this node could not start elsewhere.
    """

    job: int

    @property
    def concerns(self) -> tuple[int, ...]:
        return (self.job,)

    @property
    def summary(self) -> str:
        return f"remove the start delay of requeued job {self.job}"


@dataclass(frozen=True)
class ChangePhase(Action):
    """Move the node to another phase of its lifecycle, without acting on it."""

    to: NodePhase
    why: str
    fault: NodeFault | None = None
    excuses: tuple[str, ...] = ()  # faults that an administrator has accepted
    failed: bool = False  # true if the last repair did not help
    boot: str = ""  # the node's boot id at this change; a later boot may have repaired the node
    held_back: HeldAction = HeldAction.NO
    relapses: int = 0  # number of suspicions in a row
    about: Subject = ANYTHING
    touches: ClassVar[bool] = False

    @property
    def kind(self) -> EventKind:
        return EventKind.TURN

    @property
    def stage(self) -> EventStage:
        return EventStage.SUSPECTED if self.to is NodePhase.SUSPECTED else EventStage.INFO

    @property
    def summary(self) -> str:
        return f"{self.to.value}: {self.why}"


@dataclass(frozen=True)
class Note(Action):
    """Record a remark about the node."""

    text: str
    settles: tuple[int, ...] = ()  # jobs that have ended or restarted; they are removed from the node's victims
    held_back: HeldAction = HeldAction.NO  # why the announced action is not carried out
    excuses: tuple[str, ...] | None = None  # faults that an administrator has accepted; None: unchanged
    about: Subject = ANYTHING
    fault: bool = False  # whether the text reports a fault on which recovery does not act
    touches: ClassVar[bool] = False

    @property
    def concerns(self) -> tuple[int, ...]:
        return self.settles

    @property
    def stage(self) -> EventStage:
        return EventStage.SUSPECTED if self.fault else EventStage.INFO

    @property
    def summary(self) -> str:
        return self.text


@dataclass(frozen=True)
class ContactChange(Action):
    """Record that the controller has lost or regained contact with nearly all nodes. `node` is empty."""

    blind: bool
    why: str
    touches: ClassVar[bool] = False

    @property
    def kind(self) -> EventKind:
        return EventKind.SIGHT

    @property
    def summary(self) -> str:
        return self.why


@dataclass(frozen=True)
class Repeat(Action):
    """Repeat an action that was begun before a controller crash and whose outcome is unknown."""

    id: str
    touches: ClassVar[bool] = False  # false, so that the action is not held back, because it has already begun


@dataclass(frozen=True)
class RecordDone(Action):
    """Record an interrupted action as done, because its effect is visible."""

    id: str
    touches: ClassVar[bool] = False


KINDS: dict[str, type[Action]] = {
    kind.__name__: kind
    for kind in (
        Drain,
        SetDown,
        TakeEvidence,
        Repair,
        Validate,
        Return,
        Hold,
        Release,
        Promote,
        CloseLoan,
        Recall,
        Requeue,
        Expedite,
    )
}
KINDS["Mend"] = Repair  # the name in journals of earlier versions
