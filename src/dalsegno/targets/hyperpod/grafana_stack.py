"""Create, update and delete the CloudFormation stack with the machine for Grafana."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dalsegno.errors import TargetError
from dalsegno.targets.base import Say
from dalsegno.targets.cloud.aws import AwsApi
from dalsegno.targets.cloud.progress import OperationState, follow
from dalsegno.targets.cloud.stacks import describe_stack, read_template, report_stack, start_deletion

_UNUSABLE = ("CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "UPDATE_ROLLBACK_FAILED", "DELETE_FAILED")
_DEPLOY = "dalsegno dashboards deploy"


class GrafanaStack:
    """The stack of one cluster. `logs` is the folder for the events of a failed operation."""

    def __init__(self, aws: AwsApi, name: str, logs: Path, say: Say, pause: Callable[[float], None]) -> None:
        self._aws, self.name, self._logs, self._say, self._pause = aws, name, logs, say, pause

    def put(self, template: Mapping[str, Any], record: Callable[[], None]) -> str:
        """Create the stack, or apply the template to it. Return the id of the machine.

        A stack that CloudFormation can no longer update, such as one whose creation failed, is deleted first. `record`
        is called before the stack is created or updated. It is not called if CloudFormation refuses to show the stack.
        """
        found = describe_stack(self._aws, self.name)
        if found.state is OperationState.RUNNING:
            self._follow(f"stack {self.name}", _DEPLOY)
            found = describe_stack(self._aws, self.name)
        gone = found.state is OperationState.GONE
        if found.status in _UNUSABLE:
            self.delete()
            gone = True
        body = {"StackName": self.name, "TemplateBody": json.dumps(template), "Capabilities": ["CAPABILITY_IAM"]}
        record()
        if gone:
            self._aws.call("cloudformation", "create_stack", **body, OnFailure="DO_NOTHING")
        elif read_template(self._aws, self.name) == template:
            return self._machine()
        else:
            self._aws.call("cloudformation", "update_stack", **body)
        self._follow(f"stack {self.name}", _DEPLOY)
        return self._machine()

    def delete(self) -> bool:
        """Delete the stack and wait until it is gone. Return False if there is none."""
        if not start_deletion(self._aws, self.name):
            return False
        self._follow(f"the deletion of stack {self.name}", "dalsegno dashboards remove")
        return True

    def _follow(self, what: str, again: str) -> None:
        follow(what, lambda: report_stack(self._aws, self.name), self._say, self._logs, pause=self._pause, again=again)

    def _machine(self) -> str:
        """Return the id of the machine. Raise TargetError if the stack was deleted or changed by somebody else."""
        machine = describe_stack(self._aws, self.name).outputs.get("Machine", "")
        if not machine:
            raise TargetError(f"stack {self.name} has no machine with Grafana", hint=f"run `{_DEPLOY}` again")
        return machine
