"""OCI's Resource Manager: stacks, their jobs and the jobs' logs, through the SDK or, in tests, a fake."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Protocol

from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal, explain, refusal_of_code, repeat_throttled
from dalsegno.targets.oci.credentials import (
    CONFIG_FILE,
    HINTS,
    OciCredentials,
    SignerKind,
    find_credentials,
    import_sdk,
)


class StackOperation(Enum):
    """The operation of a job on a stack. The SDK accepts any text here, but Resource Manager does not."""

    PLAN = "PLAN"
    APPLY = "APPLY"
    DESTROY = "DESTROY"


class StackJobState(Enum):
    """The state of a job, which the API calls lifecycle-state."""

    ACCEPTED = "ACCEPTED"
    IN_PROGRESS = "IN_PROGRESS"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELING = "CANCELING"
    CANCELED = "CANCELED"
    UNKNOWN = "unknown"

    @property
    def ended(self) -> bool:
        return self in (StackJobState.SUCCEEDED, StackJobState.FAILED, StackJobState.CANCELED)


@dataclass(frozen=True)
class StackJob:
    id: str
    state: StackJobState
    failure: str = ""


class ResourceManager(Protocol):
    """The requests to Resource Manager that a cluster needs."""

    def create_stack(
        self, name: str, compartment: str, archive: bytes, variables: Mapping[str, str], tags: Mapping[str, str]
    ) -> str: ...

    def update_stack(
        self, stack: str, variables: Mapping[str, str], tags: Mapping[str, str], without: Collection[str] = ()
    ) -> None:
        """Set the variables, add the free-form tags `tags`, and remove the tags `without`. Other tags stay."""

    def has_stack(self, stack: str) -> bool: ...

    def find_stacks(self, name: str, compartment: str) -> Sequence[str]:
        """Return the ids of all stacks with this name."""

    def delete_stack(self, stack: str) -> None: ...

    def start(self, stack: str, operation: StackOperation, plan: str = "") -> str:
        """Start a job and return its id. For APPLY, `plan` is the id of the PLAN job to carry out."""

    def job(self, job: str) -> StackJob: ...

    def log(self, job: str) -> Sequence[str]: ...

    def outputs(self, job: str) -> Mapping[str, str]: ...


class SdkResourceManager:
    """Sends requests with the SDK. `endpoint` and `federation` are for tests."""

    def __init__(
        self,
        region: str,
        profile: str,
        file: str = CONFIG_FILE,
        endpoint: str = "",
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
        federation: str = "",
    ) -> None:
        self._oci, self._pause, self._clock = import_sdk(), pause, clock
        self._find = partial(find_credentials, self._oci, region, profile, file, federation)
        self._endpoint = endpoint
        self._open(self._find())

    def _open(self, credentials: OciCredentials) -> None:
        settings: dict[str, Any] = {"service_endpoint": self._endpoint} if self._endpoint else {}
        settings["signer"] = credentials.signer
        settings["retry_strategy"] = self._oci.retry.NoneRetryStrategy()  # `_call` repeats requests itself
        self._client = self._oci.resource_manager.ResourceManagerClient(dict(credentials.config), **settings)
        self.credentials = credentials

    @property
    def tenancy(self) -> str:
        return str(self.credentials.config.get("tenancy", ""))

    def _call(self, doing: str, call: Callable[[], Any]) -> Any:
        """Send a request and return the answer. Repeat it if OCI throttles it, or if the session was renewed."""
        return repeat_throttled(lambda: self._send_signed(doing, call), self._pause)

    def _send_signed(self, doing: str, call: Callable[[], Any]) -> Any:
        try:
            return self._send(doing, call)
        except CloudError as error:
            if error.refusal not in (CloudRefusal.WRONG_CREDENTIALS, CloudRefusal.EXPIRED) or not self._renew():
                raise
        return self._send(doing, call)

    def _renew(self) -> bool:
        """Read the session again, and return whether it is a new one. A job may last longer than a session."""
        if self.credentials.kind is not SignerKind.SESSION:
            return False
        found = self._find()
        if found.token == self.credentials.token:
            return False
        self._open(found)
        return True

    def _send(self, doing: str, call: Callable[[], Any]) -> Any:
        errors = self._oci.exceptions
        try:
            return call().data
        except errors.ServiceError as error:
            code = str(error.code)
            refusal = CloudRefusal.WRONG_CREDENTIALS if error.status == 401 else refusal_of_code(code)
            said = str(error.message)
            raise self.credentials.explain_refusal(refusal, f"OCI {doing}", said, code, self._clock()) from None
        except (errors.RequestException, errors.ConnectTimeout) as error:
            raise explain(CloudRefusal.UNREACHABLE, f"OCI {doing}", str(error)) from None

    def create_stack(
        self, name: str, compartment: str, archive: bytes, variables: Mapping[str, str], tags: Mapping[str, str]
    ) -> str:
        models = self._oci.resource_manager.models
        source = models.CreateZipUploadConfigSourceDetails(zip_file_base64_encoded=base64.b64encode(archive).decode())
        details = models.CreateStackDetails(
            compartment_id=compartment, display_name=name, config_source=source, variables=dict(variables),
            freeform_tags={**tags, "dalsegno-cluster": name},
        )  # fmt: skip
        return str(self._call("create-stack", lambda: self._client.create_stack(details)).id)

    def update_stack(
        self, stack: str, variables: Mapping[str, str], tags: Mapping[str, str], without: Collection[str] = ()
    ) -> None:
        settings: dict[str, Any] = {"variables": dict(variables)}
        if tags or without:  # OCI replaces all tags of the stack, so the tags to keep are sent again
            found = self._call("get-stack", lambda: self._client.get_stack(stack)).freeform_tags or {}
            kept = {name: value for name, value in found.items() if name not in without}
            settings["freeform_tags"] = {**kept, **tags}
        details = self._oci.resource_manager.models.UpdateStackDetails(**settings)
        self._call("update-stack", lambda: self._client.update_stack(stack, details))

    def has_stack(self, stack: str) -> bool:
        try:
            found = self._call("get-stack", lambda: self._client.get_stack(stack))
        except CloudError as error:
            # OCI answers 404 if a stack does not exist, and also if this user may not see it.
            if error.code == "NotAuthorizedOrNotFound" or error.refusal is CloudRefusal.NOT_THERE:
                return False
            raise
        return str(found.lifecycle_state) != "DELETED"

    def find_stacks(self, name: str, compartment: str) -> list[str]:
        settings = {"compartment_id": compartment, "display_name": name, "lifecycle_state": "ACTIVE"}
        found = self._call("list-stacks", lambda: self._client.list_stacks(**settings))
        return [str(each.id) for each in found]

    def delete_stack(self, stack: str) -> None:
        self._call("delete-stack", lambda: self._client.delete_stack(stack))

    def start(self, stack: str, operation: StackOperation, plan: str = "") -> str:
        models = self._oci.resource_manager.models
        if operation is StackOperation.PLAN:
            details = models.CreatePlanJobOperationDetails()
        elif operation is StackOperation.APPLY:
            details = models.CreateApplyJobOperationDetails(
                execution_plan_strategy="FROM_PLAN_JOB_ID" if plan else "AUTO_APPROVED",
                execution_plan_job_id=plan or None,
            )
        else:
            details = models.CreateDestroyJobOperationDetails(execution_plan_strategy="AUTO_APPROVED")
        request = models.CreateJobDetails(stack_id=stack, job_operation_details=details)
        return str(self._call("create-job", lambda: self._client.create_job(request)).id)

    def job(self, job: str) -> StackJob:
        found = self._call("get-job", lambda: self._client.get_job(job))
        known = {each.value: each for each in StackJobState}
        failure = getattr(found.failure_details, "message", "") or ""
        return StackJob(job, known.get(str(found.lifecycle_state), StackJobState.UNKNOWN), str(failure))

    def log(self, job: str) -> list[str]:
        pages = self._oci.pagination.list_call_get_all_results
        entries = self._call("get-job-logs", lambda: pages(self._client.get_job_logs, job))
        return [str(entry.message) for entry in entries]

    def outputs(self, job: str) -> dict[str, str]:
        found = self._call("list-job-outputs", lambda: self._client.list_job_outputs(job))
        return {str(each.output_name): str(each.output_value) for each in found.items if not each.is_sensitive}


PLANNED = "Plan: 12 to add, 0 to change, 0 to destroy."


@dataclass
class FakeResourceManager:
    """A Resource Manager in memory. Jobs end with the states and failures in `ends`, in order, and then with SUCCEEDED.

    A job that has ended keeps its state. `lasts` is the number of polls for which a job is IN_PROGRESS, and `planned`
    is the end of the log of each PLAN job. `refusals` are operations to refuse, with the cause. Each is refused once,
    in this order.
    """

    ends: list[tuple[StackJobState, str]] = field(default_factory=list)
    refusals: list[tuple[str, CloudRefusal]] = field(default_factory=list)
    stacks: dict[str, Mapping[str, str]] = field(default_factory=dict)
    tags: dict[str, dict[str, str]] = field(default_factory=dict)
    started: list[tuple[StackOperation, str]] = field(default_factory=list)
    polls: dict[str, int] = field(default_factory=dict)
    ended: dict[str, StackJob] = field(default_factory=dict)
    lasts: int = 1
    planned: Sequence[str] = (PLANNED,)
    tenancy: str = "ocid1.tenancy.oc1..aaaaaaaaexample"

    def _meet(self, operation: str) -> None:
        if self.refusals and self.refusals[0][0] == operation:
            raise explain(self.refusals.pop(0)[1], f"OCI {operation}", hints=HINTS)

    def create_stack(
        self, name: str, compartment: str, archive: bytes, variables: Mapping[str, str], tags: Mapping[str, str]
    ) -> str:
        self._meet("create-stack")
        stack = f"ocid1.ormstack.oc1.eu-frankfurt-1.{name}{len(self.stacks)}"
        self.stacks[stack], self.tags[stack] = dict(variables), dict(tags)
        return stack

    def update_stack(
        self, stack: str, variables: Mapping[str, str], tags: Mapping[str, str], without: Collection[str] = ()
    ) -> None:
        self._meet("update-stack")
        kept = {name: value for name, value in self.tags.get(stack, {}).items() if name not in without}
        self.stacks[stack], self.tags[stack] = dict(variables), {**kept, **tags}

    def has_stack(self, stack: str) -> bool:
        self._meet("get-stack")
        return stack in self.stacks

    def find_stacks(self, name: str, compartment: str) -> list[str]:
        self._meet("list-stacks")
        return [stack for stack in self.stacks if stack.rpartition(".")[2].rstrip("0123456789") == name]

    def delete_stack(self, stack: str) -> None:
        del self.stacks[stack]

    def start(self, stack: str, operation: StackOperation, plan: str = "") -> str:
        self._meet("create-job")
        job = f"job-{len(self.started) + 1}"
        if running := [each for each in self.polls if each not in self.ended]:
            raise explain(CloudRefusal.UNKNOWN, "OCI create-job", f"{running[0]} of the stack still runs")
        self.started.append((operation, plan))
        return job

    def job(self, job: str) -> StackJob:
        self._meet("get-job")
        if job in self.ended:
            return self.ended[job]
        self.polls[job] = self.polls.get(job, 0) + 1
        if self.polls[job] <= self.lasts:
            return StackJob(job, StackJobState.IN_PROGRESS)
        state, failure = self.ends.pop(0) if self.ends else (StackJobState.SUCCEEDED, "")
        self.ended[job] = StackJob(job, state, failure)
        return self.ended[job]

    def log(self, job: str) -> list[str]:
        lines = [f"{job}: line {number}" for number in range(1, self.polls.get(job, 0) + 1)]
        operation = self.started[int(job.removeprefix("job-")) - 1][0]
        if job not in self.ended:
            return lines
        end = self.planned if operation is StackOperation.PLAN and not self.ended[job].failure else ()
        return [*lines, *end, *self.ended[job].failure.splitlines()]

    def outputs(self, job: str) -> dict[str, str]:
        return {"controller": "203.0.113.7", "private_ips": "172.16.4.2 172.16.4.3"}
