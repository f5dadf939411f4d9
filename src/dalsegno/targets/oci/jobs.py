"""Read the log of a Terraform job: what its plan changes, the resources that are done, and the one that failed. Pure.

Resource Manager returns the lines of Terraform's console. A line may begin with a time and the name of the log.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dalsegno.targets.base import named
from dalsegno.targets.cloud.progress import ResourceEvent, ResourceEventKind

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SUMMARY = re.compile(r"Plan: (?:\d+ to import, )?(\d+) to add, (\d+) to change, (\d+) to destroy")
_NOTHING = re.compile(r"No changes\.")
_DESTROYED = re.compile(r"# (\S+)(?: \(deposed object \w+\))? (?:will be destroyed|must be replaced|is tainted)")
_ERROR = re.compile(r"(?:^|[│|\]\s])Error: (?P<message>.+?)\s*$")
_WITH = re.compile(r"(?:^|[│|\s])with (?P<resource>(?:data\.)?[A-Za-z_][\w.\-\[\]\"/]*\.[\w.\-\[\]\"/]+),\s*$")
_STEPS = {
    re.compile(r"(\S+): Creat(?:ing|e)\.\.\."): ResourceEventKind.STARTED,
    re.compile(r"(\S+): Modifying\.\.\."): ResourceEventKind.STARTED,
    re.compile(r"(\S+): Destroying\.\.\."): ResourceEventKind.STARTED,
    re.compile(r"(\S+): (?:Creation|Modifications|Destruction) complete after"): ResourceEventKind.DONE,
}


@dataclass(frozen=True)
class PlanSummary:
    """The numbers at the end of Terraform's plan, and the resources that it destroys or replaces."""

    add: int
    change: int
    destroy: int
    destroyed: tuple[str, ...] = ()

    def sentence(self) -> str:
        which = f": {named('resource', self.destroyed)}" if self.destroyed else ""
        return f"Terraform's plan: {self.add} to add, {self.change} to change, {self.destroy} to destroy{which}"


def read_plan_summary(log: Sequence[str]) -> PlanSummary | None:
    """Return the summary of a PLAN job; None if its log has none."""
    lines = [_COLOUR.sub("", line) for line in log]
    found = next((match for line in reversed(lines) if (match := _SUMMARY.search(line))), None)
    if found is None:
        return PlanSummary(0, 0, 0) if any(_NOTHING.search(line) for line in lines) else None
    destroyed = dict.fromkeys(match[1] for line in lines if (match := _DESTROYED.search(line)))
    return PlanSummary(int(found[1]), int(found[2]), int(found[3]), tuple(destroyed))


def read_events(log: Sequence[str]) -> tuple[ResourceEvent, ...]:
    """Return what the log says about single resources. An error belongs to the resource that the lines after it
    name."""
    return tuple(_events([_COLOUR.sub("", line) for text in log for line in text.splitlines()]))


def _events(lines: Sequence[str]) -> Iterator[ResourceEvent]:
    for number, line in enumerate(lines):
        if error := _ERROR.search(line):
            resource = _failed_resource(lines[number + 1 :])
            yield ResourceEvent(f"line {number}", resource, ResourceEventKind.FAILED, error["message"])
            continue
        for pattern, kind in _STEPS.items():
            if match := pattern.search(line):
                yield ResourceEvent(f"line {number}", match[1], kind)


def _failed_resource(after: Sequence[str]) -> str:
    for line in after:
        if _ERROR.search(line):
            break
        if match := _WITH.search(line):
            return match["resource"]
    return "Terraform"
