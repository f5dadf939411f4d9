"""The actions of visitors: parse requests, check permissions, and describe actions as text. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from dalsegno.errors import DalsegnoError
from dalsegno.web.sessions import Visitor
from dalsegno.web.snapshot import ClusterPicture

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_REASON = 120


class ActionKind(Enum):
    """The kinds of actions in the web page. The values are used in URLs and forms."""

    DRAIN = "drain"
    UNDRAIN = "undrain"
    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"
    INJECT = "inject"


class ActionRefused(DalsegnoError):
    """The error that an action is not allowed or not possible."""


@dataclass(frozen=True)
class WebAction:
    """An action and its subject."""

    kind: ActionKind
    node: str = ""
    run: str = ""
    job: int = 0
    reason: str = ""
    fault: str = ""
    code: int | None = None

    @property
    def question(self) -> str:
        """Return the question that the visitor must confirm."""
        return {
            ActionKind.DRAIN: f"Drain node {self.node}?",
            ActionKind.UNDRAIN: f"Return node {self.node} to service?",
            ActionKind.CANCEL: f"Cancel run {self.run}?" if self.run else f"Cancel job {self.job}?",
            ActionKind.PAUSE: "Pause automatic recovery?",
            ActionKind.RESUME: "Resume automatic recovery?",
            ActionKind.INJECT: f"Inject a fault into node {self.node}?",
        }[self.kind]

    @property
    def effect(self) -> str:
        """Return the consequences of the action."""
        return {
            ActionKind.DRAIN: "Running jobs continue. No new job starts there until the node is resumed.",
            ActionKind.UNDRAIN: "Slurm starts jobs there again. If a fault was found, it is ignored from now on.",
            ActionKind.CANCEL: "All its processes end. Checkpoints on disk stay." if self.run else "The job ends.",
            ActionKind.PAUSE: "Nodes are still watched, but none is drained, repaired or replaced.",
            ActionKind.RESUME: "Repairs that had failed are tried again, and the hourly limit starts over.",
            ActionKind.INJECT: "The fault is real for everything that runs on the node.",
        }[self.kind]

    @property
    def verb(self) -> str:
        """Return the label of the button."""
        return {
            ActionKind.DRAIN: "Drain",
            ActionKind.UNDRAIN: "Resume",
            ActionKind.CANCEL: "Cancel run" if self.run else "Cancel job",
            ActionKind.PAUSE: "Pause",
            ActionKind.RESUME: "Resume",
            ActionKind.INJECT: "Inject",
        }[self.kind]

    @property
    def back(self) -> str:
        """Return the address of the page to show afterwards."""
        if self.node:
            return f"/node/{self.node}"
        return f"/run/{self.run}" if self.run else "/queue" if self.job else "/"


def parse_action(fields: Mapping[str, str]) -> WebAction:
    """Parse the fields of a form or an address; raise ActionRefused if they are not valid."""
    kind = next((each for each in ActionKind if each.value == fields.get("do")), None)
    node, run, job, code = (fields.get(name, "") for name in ("node", "run", "job", "code"))
    valid = all(_NAME.fullmatch(name) for name in (node, run) if name)
    numbers = all(re.fullmatch(r"[0-9]{0,9}", text) for text in (job, code))
    if kind is None or not valid or not numbers or not _has_subject(kind, node, run, job):
        raise ActionRefused("this is not an action of the web page")
    reason = "".join(letter for letter in fields.get("reason", "") if letter.isprintable())[:MAX_REASON].strip()
    fault = fields.get("fault", "")
    return WebAction(kind, node, run, int(job or 0), reason, fault[:40], int(code) if code else None)


def _has_subject(kind: ActionKind, node: str, run: str, job: str) -> bool:
    if kind in (ActionKind.PAUSE, ActionKind.RESUME):
        return True
    return bool(run) != bool(job) if kind is ActionKind.CANCEL else bool(node)


def check_allowed(action: WebAction, visitor: Visitor, snapshot: ClusterPicture) -> None:
    """Raise ActionRefused unless the visitor is allowed to do this and the node, run or job exists."""
    if action.kind is not ActionKind.CANCEL:
        if not visitor.operates:
            raise ActionRefused("only root and the cluster's owner may do this")
        if action.node and action.node not in snapshot.nodes:
            raise ActionRefused(f"there is no node {action.node}")
        return
    view, job = snapshot.run(action.run), snapshot.job(action.job)
    if view is None and job is None:
        raise ActionRefused("there is no such run or job any more")
    owner = view.uid if view else job.uid if job else None
    if not visitor.may_cancel(owner):
        raise ActionRefused("you may cancel only your own runs and jobs")
