"""Create, update and delete the CloudFormation stack with the machine for Grafana."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dalsegno.targets.base import Say
from dalsegno.targets.cloud.aws import AwsApi
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal
from dalsegno.targets.cloud.progress import OperationReport, OperationState, ResourceEvent, ResourceEventKind, follow

_UNUSABLE = ("CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED")
_GONE = "DELETE_COMPLETE"
_DEPLOY = "dalsegno dashboards deploy"


class GrafanaStack:
    """The stack of one cluster. `logs` is the folder for the events of a failed operation."""

    def __init__(self, aws: AwsApi, name: str, logs: Path, say: Say, pause: Callable[[float], None]) -> None:
        self._aws, self.name, self._logs, self._say, self._pause = aws, name, logs, say, pause

    def put(self, template: Mapping[str, Any]) -> str:
        """Create the stack, or apply the template to it. Return the id of the machine.

        A stack whose creation or deletion failed is deleted first.
        """
        if self._status().endswith("IN_PROGRESS"):
            self._follow(f"stack {self.name}", _DEPLOY)
        if self._status() in _UNUSABLE:
            self.delete()
        body = {"StackName": self.name, "TemplateBody": json.dumps(template), "Capabilities": ["CAPABILITY_IAM"]}
        if self._status() == _GONE:
            self._aws.call("cloudformation", "create_stack", **body, OnFailure="DO_NOTHING")
        elif self._template() == template:
            return self._machine()
        else:
            self._aws.call("cloudformation", "update_stack", **body)
        self._follow(f"stack {self.name}", _DEPLOY)
        return self._machine()

    def delete(self) -> bool:
        """Delete the stack and wait until it is gone. Return False if there is none."""
        if self._status() == _GONE:
            return False
        self._aws.call("cloudformation", "delete_stack", StackName=self.name)
        self._follow(f"the deletion of stack {self.name}", "dalsegno dashboards remove")
        return True

    def _follow(self, what: str, again: str) -> None:
        follow(what, self._report, self._say, self._logs, pause=self._pause, again=again)

    def _stack(self) -> Mapping[str, Any]:
        try:
            found = self._aws.call("cloudformation", "describe_stacks", StackName=self.name).get("Stacks", [])
        except CloudError as error:
            # CloudFormation reports a stack that does not exist as a validation error.
            if error.refusal in (CloudRefusal.NOT_THERE, CloudRefusal.INVALID):
                return {}
            raise
        return found[0] if found else {}

    def _status(self) -> str:
        return str(self._stack().get("StackStatus", _GONE))

    def _machine(self) -> str:
        outputs = {str(each["OutputKey"]): str(each.get("OutputValue", "")) for each in self._stack()["Outputs"]}
        return outputs["Machine"]

    def _template(self) -> object:
        found = self._aws.call("cloudformation", "get_template", StackName=self.name).get("TemplateBody", {})
        return json.loads(found) if isinstance(found, str) else found

    def _report(self) -> OperationReport:
        stack = self._stack()
        status = str(stack.get("StackStatus", _GONE))
        if status == _GONE:
            return OperationReport(OperationState.GONE)
        if status.endswith("IN_PROGRESS"):
            return OperationReport(OperationState.RUNNING)
        if not (status.endswith("FAILED") or "ROLLBACK" in status):
            return OperationReport(OperationState.DONE)
        answer = self._aws.call("cloudformation", "describe_stack_events", StackName=self.name)
        events = tuple(_event(each) for each in reversed(answer.get("StackEvents", ())))
        return OperationReport(OperationState.FAILED, events, str(stack.get("StackStatusReason", "")))


def _event(each: Mapping[str, Any]) -> ResourceEvent:
    status, message = str(each.get("ResourceStatus", "")), str(each.get("ResourceStatusReason", ""))
    # CloudFormation has no status of its own for resources that it cancels because another one failed.
    cancelled = "cancelled" in message.lower()
    kind = ResourceEventKind.CANCELLED if cancelled else ResourceEventKind.FAILED
    resource = f"{each.get('LogicalResourceId', '')} ({each.get('ResourceType', '')})"
    known = kind if status.endswith("FAILED") else ResourceEventKind.OTHER
    return ResourceEvent(str(each.get("EventId", "")), resource, known, message, str(each.get("Timestamp", "")))
