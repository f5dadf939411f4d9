"""What can be done, each as a value. `touches` is false for what only changes our own book."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dalsegno.health import Remedy
from dalsegno.recovery.event import EventKind, EventStage
from dalsegno.recovery.facts import NodeFault
from dalsegno.recovery.phase import HeldAction, NodePhase
from dalsegno.recovery.reason import ANYTHING, Subject
from dalsegno.slurm.parse.messages import SlurmRefusal, parse_refusal


@dataclass(frozen=True)
class Action:
    node: str
    touches: ClassVar[bool] = True
    slow: ClassVar[bool] = False  # done beside the loop

    @property
    def kind(self) -> EventKind:
        return EventKind(type(self).__name__.lower())

    @property
    def words(self) -> str:
        return type(self).__name__.lower()

    @property
    def concerns(self) -> tuple[int, ...]:
        """Return the jobs that its events name."""
        return ()

    @property
    def stage(self) -> EventStage:
        """Return the stage of the event of what is only noted, and not done."""
        return EventStage.TOLD

    def failure(self, error: str) -> str:
        """What to tell when it could not be done."""
        return f"could not {self.words}: {error}"


@dataclass(frozen=True)
class Drain(Action):
    """Let nothing new onto the node. `held` are the jobs that it has, `runs` the runs among them."""

    fault: NodeFault
    held: tuple[int, ...] = ()
    runs: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return f"drain it: {self.fault.words}"


@dataclass(frozen=True)
class SetDown(Action):
    """Have Slurm take the node out of its jobs at once. `jobs` are the plain ones among them."""

    fault: NodeFault
    jobs: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    runs: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return f"set it down: {self.fault.text}"


@dataclass(frozen=True)
class TakeEvidence(Action):
    """Save what tells why, before it is lost. `jobs` are those that it had when it was taken out."""

    jobs: tuple[int, ...] = ()
    slow: ClassVar[bool] = True

    @property
    def kind(self) -> EventKind:
        return EventKind.EVIDENCE

    @property
    def words(self) -> str:
        return "save the evidence"


@dataclass(frozen=True)
class Mend(Action):
    """Reset its GPUs, reboot it or replace it. `boot` is the one that ends with it, `gpus` are its GPUs' ids."""

    how: Remedy
    fault: NodeFault
    boot: str = ""
    gpus: tuple[str, ...] = ()
    why: str = ""  # why nothing lighter
    slow: ClassVar[bool] = True

    @property
    def kind(self) -> EventKind:
        return EventKind(self.how.value)

    @property
    def words(self) -> str:
        return f"{self.how.value} it: {self.fault.words}" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True)
class Validate(Action):
    """Have the node prove itself, alone and, where there is one, with a partner."""

    partner: str = ""
    boot: str = ""

    @property
    def words(self) -> str:
        return "validate it" + (f" together with {self.partner}" if self.partner else "")


@dataclass(frozen=True)
class Return(Action):
    """Take the node back into service. `proof` is what its validation has to show, or, untried, what speaks for it."""

    proof: str = ""
    tried: bool = True

    @property
    def words(self) -> str:
        return "return it to service"


@dataclass(frozen=True)
class Hold(Action):
    """Keep the node as a spare. `proof` is what its validation has to show."""

    proof: str = ""

    @property
    def words(self) -> str:
        return "keep it as a spare"


@dataclass(frozen=True)
class Release(Action):
    """Give a spare to the job that asks for one node more; `run` is for whom, "" where it had the spare already."""

    job: int
    run: str = ""
    uid: int = 0  # whose job it is

    @property
    def concerns(self) -> tuple[int, ...]:
        return (self.job,)

    @property
    def words(self) -> str:
        return f"release it for job {self.job}"


@dataclass(frozen=True)
class CloseLoan(Action):
    """Keep further jobs away from a lent spare, now that the job it was lent to runs there."""

    @property
    def words(self) -> str:
        return "keep it for the job that has it"


@dataclass(frozen=True)
class Recall(Action):
    """Take a spare back from a job that does not start on it. Its run may be lent another one."""

    job: int
    run: str = ""

    @property
    def concerns(self) -> tuple[int, ...]:
        return (self.job,)

    @property
    def words(self) -> str:
        return f"take it back from job {self.job}"


@dataclass(frozen=True)
class Requeue(Action):
    """Start a job anew that cannot go on here. One that may not be requeued is left alone."""

    job: int

    @property
    def concerns(self) -> tuple[int, ...]:
        return (self.job,)

    def failure(self, error: str) -> str:
        if parse_refusal(error) is SlurmRefusal.REQUEUE_DISABLED:
            return f"job {self.job} cannot go on here, and may not be requeued: it is left alone, and waited for"
        return super().failure(error)

    @property
    def words(self) -> str:
        return f"requeue job {self.job}"


@dataclass(frozen=True)
class Expedite(Action):
    """A job that Slurm has requeued need not wait for two minutes.

    What it asks for stays as its owner has written it: Slurm lets it onto no node that is out, and one that was mended
    and validated is as good as any. A job that needs all nodes, or this very one, would never start without it.
    """

    job: int

    @property
    def concerns(self) -> tuple[int, ...]:
        return (self.job,)

    @property
    def words(self) -> str:
        return f"start requeued job {self.job} without the wait"


@dataclass(frozen=True)
class Turn(Action):
    """The node is in another phase of its life from now on; nothing is done to it."""

    to: NodePhase
    why: str
    fault: NodeFault | None = None
    excuses: tuple[str, ...] = ()  # faults that someone has decided to live with
    failed: bool = False  # what was tried last has not helped
    boot: str = ""  # a later one may have mended it
    held_back: HeldAction = HeldAction.NO
    relapses: int = 0  # how often it was suspected in a row
    about: Subject = ANYTHING
    touches: ClassVar[bool] = False

    @property
    def stage(self) -> EventStage:
        return EventStage.SUSPECTED if self.to is NodePhase.SUSPECTED else EventStage.TOLD

    @property
    def words(self) -> str:
        return f"{self.to.value}: {self.why}"


@dataclass(frozen=True)
class Note(Action):
    """Something to be known."""

    text: str
    settles: tuple[int, ...] = ()  # jobs of which all is said now
    held_back: HeldAction = HeldAction.NO  # what it tells of is not done
    excuses: tuple[str, ...] | None = None  # faults that are left to someone else from now on; None: as before
    about: Subject = ANYTHING
    fault: bool = False  # it tells of one that is left as it is
    touches: ClassVar[bool] = False

    @property
    def concerns(self) -> tuple[int, ...]:
        return self.settles

    @property
    def stage(self) -> EventStage:
        return EventStage.SUSPECTED if self.fault else EventStage.TOLD

    @property
    def words(self) -> str:
        return self.text


@dataclass(frozen=True)
class Sight(Action):
    """The whole cluster is out of our sight, or is seen again; `node` is empty."""

    blind: bool
    why: str
    touches: ClassVar[bool] = False

    @property
    def words(self) -> str:
        return self.why


@dataclass(frozen=True)
class Again(Action):
    """An action that was begun before a controller's death, and of whose end nothing is known: do it (again)."""

    id: str
    touches: ClassVar[bool] = False  # it was decided already


@dataclass(frozen=True)
class Found(Action):
    """The same, and the world shows that it was done."""

    id: str
    touches: ClassVar[bool] = False


KINDS: dict[str, type[Action]] = {
    kind.__name__: kind
    for kind in (
        Drain,
        SetDown,
        TakeEvidence,
        Mend,
        Validate,
        Return,
        Hold,
        Release,
        CloseLoan,
        Recall,
        Requeue,
        Expedite,
    )
}
