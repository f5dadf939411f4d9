"""Read stacks of CloudFormation: their state, outputs, templates, and the events of their last operation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dalsegno.targets.cloud.aws import AwsApi
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal
from dalsegno.targets.cloud.progress import OperationReport, OperationState, ResourceEvent, ResourceEventKind

_GONE = "DELETE_COMPLETE"
_STACK = "AWS::CloudFormation::Stack"
# CloudFormation reports a stack that does not exist as a validation error.
_NOT_THERE = (CloudRefusal.NOT_THERE, CloudRefusal.INVALID)


@dataclass(frozen=True)
class StackDescription:
    """A stack, as CloudFormation describes it. A stack that never existed looks like a deleted one."""

    status: str = _GONE
    reason: str = ""  # CloudFormation's own words about the status
    outputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def state(self) -> OperationState:
        """The state of the last operation on the stack."""
        if self.status == _GONE:
            return OperationState.GONE
        if self.status.endswith("IN_PROGRESS"):
            return OperationState.RUNNING
        failed = self.status.endswith("FAILED") or "ROLLBACK" in self.status
        return OperationState.FAILED if failed else OperationState.DONE


def describe_stack(api: AwsApi, stack: str) -> StackDescription:
    try:
        found = api.call("cloudformation", "describe_stacks", StackName=stack).get("Stacks", [])
    except CloudError as error:
        if error.refusal in _NOT_THERE:
            return StackDescription()
        raise
    if not found:
        return StackDescription()
    return StackDescription(
        str(found[0].get("StackStatus", "")),
        str(found[0].get("StackStatusReason", "")),
        {str(each["OutputKey"]): str(each.get("OutputValue", "")) for each in found[0].get("Outputs", ())},
    )


def read_template(api: AwsApi, stack: str) -> Mapping[str, Any]:
    """Return the template that a stack was created from or last updated with."""
    found = api.call("cloudformation", "get_template", StackName=stack).get("TemplateBody", {})
    parsed: Mapping[str, Any] = json.loads(found) if isinstance(found, str) else found
    return parsed


def report_stack(api: AwsApi, stack: str) -> OperationReport:
    """Return the progress of the last operation on a stack."""
    found = describe_stack(api, stack)
    if found.state is OperationState.GONE:
        return OperationReport(found.state)
    try:
        answer = api.call("cloudformation", "describe_stack_events", StackName=stack)
    except CloudError as error:
        if error.refusal not in _NOT_THERE:
            raise
        return OperationReport(OperationState.GONE)  # deleted after its state was read
    events = tuple(parse_event(each) for each in reversed(answer.get("StackEvents", ())))
    return OperationReport(found.state, last_operation(events, stack), found.reason)


def start_deletion(api: AwsApi, stack: str) -> bool:
    """Start the deletion of a stack. Return False if there is none."""
    if describe_stack(api, stack).state is OperationState.GONE:
        return False
    api.call("cloudformation", "delete_stack", StackName=stack)
    return True


def parse_event(each: Mapping[str, Any]) -> ResourceEvent:
    """Parse an event of CloudFormation, from `pcluster` (camelCase) or from AWS's API (PascalCase)."""

    def get(name: str) -> str:
        return str(each.get(name) or each.get(name[0].lower() + name[1:]) or "")

    status, message = get("ResourceStatus"), get("ResourceStatusReason")
    return ResourceEvent(
        get("EventId"),
        f"{get('LogicalResourceId')} ({get('ResourceType')})",
        _event_kind(status, message),
        message,
        get("Timestamp") or get("EventTime"),
    )


def last_operation(events: Sequence[ResourceEvent], stack: str) -> tuple[ResourceEvent, ...]:
    """Return the events of the last operation on a stack. A stack keeps the events of all operations."""
    own = f"{stack} ({_STACK})"
    starts = [
        at
        for at, event in enumerate(events)
        if event.resource == own and event.kind is ResourceEventKind.STARTED and event.message == "User Initiated"
    ]
    return tuple(events[starts[-1] :] if starts else events)


def _event_kind(status: str, message: str) -> ResourceEventKind:
    if status.endswith("FAILED"):
        # CloudFormation has no status of its own for resources that it cancels because another one failed.
        cancelled = "cancelled" in message.lower()
        return ResourceEventKind.CANCELLED if cancelled else ResourceEventKind.FAILED
    if status.endswith("COMPLETE"):
        return ResourceEventKind.DONE
    return ResourceEventKind.STARTED if status.endswith("IN_PROGRESS") else ResourceEventKind.OTHER
