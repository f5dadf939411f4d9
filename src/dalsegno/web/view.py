"""A page as parts, so that a stream sends only the parts that have changed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dalsegno.health.result import Verdict
from dalsegno.recovery.journal.event import Event
from dalsegno.runs.coordinator.reports.history import StepPoint
from dalsegno.runs.journal import Entry
from dalsegno.web.html import tag
from dalsegno.web.sessions import Visitor
from dalsegno.web.snapshot import ClusterPicture, RunPicture


@dataclass(frozen=True)
class PagePart:
    """A piece of a page. The id of its outer element is `id`.

    If `items` are given, each of them is an element with its own id, between `before` and `after`. Only items that have
    changed are sent, because a map may have a thousand nodes.
    """

    id: str
    before: str
    items: tuple[tuple[str, str], ...] = ()
    after: str = ""

    @property
    def html(self) -> str:
        return "".join([self.before, *(html for _, html in self.items), self.after])


@dataclass(frozen=True)
class Page:
    """A page. `section` is the entry of the navigation that is highlighted."""

    title: str
    section: str
    parts: tuple[PagePart, ...]
    status: int = 200


def changes(before: Sequence[PagePart], after: Sequence[PagePart]) -> dict[str, str] | None:
    """Return the elements to replace, by id. Return None if the page now has other parts and must be loaded again."""
    if [part.id for part in before] != [part.id for part in after]:
        return None
    found: dict[str, str] = {}
    for old, new in zip(before, after, strict=True):
        if old == new:
            continue
        frame = (old.before, old.after, [id for id, _ in old.items])
        if new.items and frame == (new.before, new.after, [id for id, _ in new.items]):
            known = dict(old.items)
            found.update({id: html for id, html in new.items if known[id] != html})
        else:
            found[new.id] = new.html
    return found


@dataclass(frozen=True)
class GpuRecord:
    """A GPU that is or was in a node."""

    slot: int
    uuid: str
    serial: str
    model: str
    since: float | None
    replaced_at: float | None


@dataclass(frozen=True)
class CheckRecord:
    """A recorded change of a check's result."""

    at: float
    check: str
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class EvidenceBundle:
    """Evidence that was saved before a node was repaired: file names and sizes in bytes."""

    name: str
    files: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class NodeDetails:
    """The records about one node."""

    tried: tuple[str, ...] = ()
    excused: tuple[str, ...] = ()
    gpus: tuple[GpuRecord, ...] = ()
    checks: tuple[CheckRecord, ...] = ()
    events: tuple[Event, ...] = ()
    evidence: tuple[EvidenceBundle, ...] = ()
    faults: tuple[str, ...] = ()  # faults that can be injected; empty if the target does not support that


@dataclass(frozen=True)
class RunDetails:
    """The history and the journal of one run."""

    points: tuple[StepPoint, ...] = ()
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class UserHours:
    """GPU hours and node hours of a user in an account."""

    user: str
    account: str
    jobs: int
    gpu_hours: float
    node_hours: float


@dataclass(frozen=True)
class DrillSummary:
    """A saved drill report."""

    name: str
    at: float
    survived: bool
    faults: int
    share: float
    median_resume_s: float | None = None
    exact: bool | None = None


class PageData(Protocol):
    """The data that a page reads only when it is opened."""

    def node_details(self, node: str) -> NodeDetails: ...

    def run_details(self, view: RunPicture) -> RunDetails: ...

    def user_hours(self, days: int) -> Sequence[UserHours] | None:
        """Return each user's GPU and node hours in the last days; None if the cluster has no accounting."""
        ...

    def drills(self) -> Sequence[DrillSummary]: ...

    def gpus_of(self, view: RunPicture) -> int:
        """Return the largest number of GPUs that a run has held, with its spares; 0 if unknown."""
        ...

    @property
    def gpu_price(self) -> GpuPrice: ...


@dataclass(frozen=True)
class GpuPrice:
    """The price of a GPU hour, and a text about it for the page. If the amount is 0, no costs are shown."""

    amount: float = 0.0
    text: str = "set monitoring.gpu_hour_price in the cluster file to see money"


@dataclass(frozen=True)
class PageContext:
    """The values from which a page is rendered."""

    snapshot: ClusterPicture
    visitor: Visitor
    data: PageData
    query: Mapping[str, str] = field(default_factory=dict)


def section(id: str, title: object, *children: object, note: object = None) -> PagePart:
    """Return a part with a heading."""
    head = tag("header", tag("h2", title), None if note is None else tag("p", note, class_="note"))
    return PagePart(id, tag("section", head, children, id=id, class_="panel"))


def bare(id: str, *children: object, **attributes: object) -> PagePart:
    """Return a part without a heading."""
    return PagePart(id, tag("div", children, id=id, **attributes))
