"""Resource Manager of OCI: stacks, their jobs and the logs of jobs, through the SDK or, in tests, a fake."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from dalsegno.errors import TargetError, install_hint
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal, explain, refusal_of_code, repeat_throttled

_HINTS = {
    CloudRefusal.WRONG_CREDENTIALS: "check key and fingerprint in ~/.oci/config; `oci iam region list` tests them",
    CloudRefusal.EXPIRED: "log in again: `oci session authenticate`, then repeat the command",
    CloudRefusal.DENIED: "`dalsegno plan --write FOLDER` writes the IAM policies that the tenancy needs",
    CloudRefusal.CAPACITY: "choose another availability domain, reserve capacity, or ask for fewer nodes",
    CloudRefusal.QUOTA: "request a higher service limit in the console (Limits, Quotas and Usage)",
    CloudRefusal.NOT_THERE: "check `oci.stack`, `oci.compartment` and `oci.region` in the cluster file",
}


class StackOperation(Enum):
    """What a job does with a stack. The SDK accepts any text; Resource Manager accepts only these."""

    PLAN = "PLAN"
    APPLY = "APPLY"
    DESTROY = "DESTROY"


class StackJobState(Enum):
    """The state of a job (lifecycle-state)."""

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
    """The part of Resource Manager that a cluster needs."""

    def create_stack(self, name: str, compartment: str, archive: bytes, variables: Mapping[str, str]) -> str: ...

    def update_stack(self, stack: str, variables: Mapping[str, str]) -> None: ...

    def has_stack(self, stack: str) -> bool: ...

    def find_stacks(self, name: str, compartment: str) -> Sequence[str]:
        """Return the ids of all stacks with this name."""

    def delete_stack(self, stack: str) -> None: ...

    def start(self, stack: str, operation: StackOperation, plan: str = "") -> str:
        """Start a job and return its id. `plan` is the PLAN job that an APPLY carries out."""

    def job(self, job: str) -> StackJob: ...

    def log(self, job: str) -> Sequence[str]: ...

    def outputs(self, job: str) -> Mapping[str, str]: ...


class SdkResourceManager:
    """Sends requests with the SDK and a profile of ~/.oci/config. `endpoint` is for tests."""

    def __init__(
        self,
        region: str,
        profile: str,
        file: str = "~/.oci/config",
        endpoint: str = "",
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._oci, self._pause = _import_sdk(), pause
        try:
            self.config = {**self._oci.config.from_file(file, profile), "region": region}
            settings = {"service_endpoint": endpoint} if endpoint else {}
            settings["retry_strategy"] = self._oci.retry.NoneRetryStrategy()  # `_call` repeats requests itself
            self._client = self._oci.resource_manager.ResourceManagerClient(self.config, **settings)
        except Exception as error:  # the SDK has a class for each way in which a profile can be wrong
            raise CloudError(
                CloudRefusal.NO_CREDENTIALS,
                f"profile `{profile}` of {file} cannot be used: {error}",
                hint="`oci setup config` writes it; `oci.profile` of the cluster file names another one",
            ) from None

    @property
    def tenancy(self) -> str:
        return str(self.config.get("tenancy", ""))

    def _call(self, doing: str, call: Callable[[], Any]) -> Any:
        """Send a request. One that OCI throttles is repeated."""
        return repeat_throttled(lambda: self._send(doing, call), self._pause)

    def _send(self, doing: str, call: Callable[[], Any]) -> Any:
        errors = self._oci.exceptions
        try:
            return call().data
        except errors.ServiceError as error:
            code = str(error.code)
            refusal = CloudRefusal.WRONG_CREDENTIALS if error.status == 401 else refusal_of_code(code)
            raise explain(refusal, f"OCI {doing}", str(error.message), code, _HINTS) from None
        except (errors.RequestException, errors.ConnectTimeout) as error:
            raise explain(CloudRefusal.UNREACHABLE, f"OCI {doing}", str(error)) from None

    def create_stack(self, name: str, compartment: str, archive: bytes, variables: Mapping[str, str]) -> str:
        models = self._oci.resource_manager.models
        source = models.CreateZipUploadConfigSourceDetails(zip_file_base64_encoded=base64.b64encode(archive).decode())
        details = models.CreateStackDetails(
            compartment_id=compartment, display_name=name, config_source=source, variables=dict(variables),
            freeform_tags={"dalsegno-cluster": name},
        )  # fmt: skip
        return str(self._call("create-stack", lambda: self._client.create_stack(details)).id)

    def update_stack(self, stack: str, variables: Mapping[str, str]) -> None:
        details = self._oci.resource_manager.models.UpdateStackDetails(variables=dict(variables))
        self._call("update-stack", lambda: self._client.update_stack(stack, details))

    def has_stack(self, stack: str) -> bool:
        try:
            found = self._call("get-stack", lambda: self._client.get_stack(stack))
        except CloudError as error:
            # OCI answers 404 both if a stack does not exist and if it may not be seen.
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


def _import_sdk() -> Any:
    try:
        import oci
        import oci.resource_manager
    except ImportError:
        raise TargetError("the OCI SDK for Python is not installed", hint=install_hint("oci")) from None
    return oci


@dataclass
class FakeResourceManager:
    """Resource Manager in memory. `ends` are the states and failures that jobs end with; SUCCEEDED by default.

    `refusals` are raised once each, in order, by the operation they name.
    """

    ends: list[tuple[StackJobState, str]] = field(default_factory=list)
    refusals: list[tuple[str, CloudRefusal]] = field(default_factory=list)
    stacks: dict[str, Mapping[str, str]] = field(default_factory=dict)
    started: list[tuple[StackOperation, str]] = field(default_factory=list)
    polls: dict[str, int] = field(default_factory=dict)
    tenancy: str = "ocid1.tenancy.oc1..aaaaaaaaexample"

    def _meet(self, operation: str) -> None:
        if self.refusals and self.refusals[0][0] == operation:
            raise explain(self.refusals.pop(0)[1], f"OCI {operation}", hints=_HINTS)

    def create_stack(self, name: str, compartment: str, archive: bytes, variables: Mapping[str, str]) -> str:
        self._meet("create-stack")
        stack = f"ocid1.ormstack.oc1.eu-frankfurt-1.{name}{len(self.stacks)}"
        self.stacks[stack] = dict(variables)
        return stack

    def update_stack(self, stack: str, variables: Mapping[str, str]) -> None:
        self._meet("update-stack")
        self.stacks[stack] = dict(variables)

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
        self.started.append((operation, plan))
        return f"job-{len(self.started)}"

    def job(self, job: str) -> StackJob:
        self._meet("get-job")
        self.polls[job] = self.polls.get(job, 0) + 1
        if self.polls[job] == 1:
            return StackJob(job, StackJobState.IN_PROGRESS)
        state, failure = self.ends.pop(0) if self.ends else (StackJobState.SUCCEEDED, "")
        return StackJob(job, state, failure)

    def log(self, job: str) -> list[str]:
        return [f"{job}: line {number}" for number in range(1, self.polls.get(job, 0) + 1)]

    def outputs(self, job: str) -> dict[str, str]:
        return {"controller": "203.0.113.7", "private_ips": "172.16.4.2 172.16.4.3"}
