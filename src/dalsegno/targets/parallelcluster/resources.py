"""Read and change what a cluster needs on AWS: stacks, reservations, quotas, key pairs, objects in S3, repositories."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dalsegno.errors import TargetError
from dalsegno.spec.aws_facts import DataRepository, PclusterSettings
from dalsegno.system.files import make_folder
from dalsegno.targets.base import Say
from dalsegno.targets.cloud.aws import AwsApi, caller_account
from dalsegno.targets.cloud.consequences import CapacityCheck
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal
from dalsegno.targets.cloud.progress import POLL_S, OperationReport, OperationState, follow
from dalsegno.targets.parallelcluster.client import last_operation, parse_event
from dalsegno.targets.parallelcluster.plan import CapacityReservation, check_quota, parse_reservation, quota_needs

Pause = Callable[[float], None]


class AwsResources:
    """The resources of one cluster, through an `AwsApi`."""

    def __init__(self, api: AwsApi, logs: Path, pause: Pause = time.sleep) -> None:
        self.api, self._logs, self._pause = api, logs, pause

    # Stacks
    def outputs(self, stack: str) -> dict[str, str] | None:
        """Return the outputs of a stack; None if there is no such stack, or if it was deleted."""
        found = self._stack(stack)
        if found is None or str(found.get("StackStatus", "")).startswith("DELETE_COMPLETE"):
            return None
        return {str(each["OutputKey"]): str(each.get("OutputValue", "")) for each in found.get("Outputs", ())}

    def stack_state(self, stack: str) -> OperationState:
        found = self._stack(stack)
        status = str(found.get("StackStatus", "")) if found else "DELETE_COMPLETE"
        if status == "DELETE_COMPLETE":
            return OperationState.GONE
        if status.endswith("IN_PROGRESS"):
            return OperationState.RUNNING
        failed = status.endswith("FAILED") or "ROLLBACK" in status
        return OperationState.FAILED if failed else OperationState.DONE

    def _stack(self, stack: str) -> Mapping[str, Any] | None:
        try:
            found = self.api.call("cloudformation", "describe_stacks", StackName=stack).get("Stacks", [])
        except CloudError as error:
            # A stack that does not exist is a validation error for CloudFormation.
            if error.refusal in (CloudRefusal.NOT_THERE, CloudRefusal.INVALID):
                return None
            raise
        return found[0] if found else None

    def put_stack(self, stack: str, template: Mapping[str, Any], tags: Mapping[str, str], say: Say) -> dict[str, str]:
        """Create or update a stack, follow it to its end, and return its outputs."""
        state = self.stack_state(stack)
        common: dict[str, Any] = {
            "StackName": stack,
            "TemplateBody": json.dumps(template),
            "Capabilities": ["CAPABILITY_IAM"],
            "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
        }
        if state is OperationState.FAILED and not self._created_once(stack):
            say(f"removing what a failed creation of stack {stack} left")
            self.delete_stack(stack, say)
            state = OperationState.GONE
        if state is OperationState.GONE:
            self.api.call("cloudformation", "create_stack", **common, OnFailure="DO_NOTHING")
        elif state is not OperationState.RUNNING:
            try:
                self.api.call("cloudformation", "update_stack", **common)
            except CloudError as error:
                # CloudFormation has the same code for a template without changes and for a wrong one.
                if error.refusal is not CloudRefusal.INVALID or self._template(stack) != template:
                    raise
        follow(f"stack {stack}", lambda: self.report(stack), say, self._logs, pause=self._pause)
        return self.outputs(stack) or {}

    def _template(self, stack: str) -> Mapping[str, Any]:
        """Return the template that a stack was created from or last updated with."""
        found = self.api.call("cloudformation", "get_template", StackName=stack).get("TemplateBody", {})
        parsed: Mapping[str, Any] = json.loads(found) if isinstance(found, str) else found
        return parsed

    def _created_once(self, stack: str) -> bool:
        found = self._stack(stack)
        return str(found.get("StackStatus", "") if found else "").startswith("UPDATE")

    def report(self, stack: str) -> OperationReport:
        """Return the progress of the operation on a stack."""
        state = self.stack_state(stack)
        if state is OperationState.GONE:
            return OperationReport(state)
        try:
            answer = self.api.call("cloudformation", "describe_stack_events", StackName=stack)
        except CloudError as error:
            if error.refusal not in (CloudRefusal.NOT_THERE, CloudRefusal.INVALID):
                raise
            return OperationReport(OperationState.GONE)  # deleted after its state was read
        events = tuple(parse_event(each) for each in reversed(answer.get("StackEvents", [])))
        return OperationReport(state, last_operation(events, stack))

    def delete_stack(self, stack: str, say: Say) -> bool:
        """Delete a stack with everything in it; return False if there was none."""
        if self.stack_state(stack) is OperationState.GONE:
            return False
        self.api.call("cloudformation", "delete_stack", StackName=stack)
        follow(f"deletion of stack {stack}", lambda: self.report(stack), say, self._logs, pause=self._pause)
        return True

    # Reservations, subnets, quotas
    def reservations(self, own: PclusterSettings) -> dict[str, CapacityReservation]:
        """Return the capacity reservations of the queues that exist, by id."""
        wanted = sorted({queue.capacity_reservation for queue in own.queues if queue.capacity_reservation})
        if not wanted:
            return {}
        try:
            answer = self.api.call("ec2", "describe_capacity_reservations", CapacityReservationIds=wanted)
        except CloudError as error:
            if error.refusal is not CloudRefusal.NOT_THERE:
                raise
            return {}
        found = [parse_reservation(each) for each in answer.get("CapacityReservations", ())]
        return {each.id: each for each in found}

    def zones(self, subnets: Iterable[str]) -> dict[str, str]:
        """Return the availability zone of each subnet."""
        wanted = sorted(set(subnets))
        if not wanted:
            return {}
        answer = self.api.call("ec2", "describe_subnets", SubnetIds=wanted)
        return {str(each["SubnetId"]): str(each["AvailabilityZone"]) for each in answer.get("Subnets", ())}

    def quotas(self, own: PclusterSettings) -> list[CapacityCheck]:
        """Compare the account's quotas with what the cluster needs. The user must check a quota that cannot be read."""
        checks = []
        for need in quota_needs(own):
            try:
                answer = self.api.call(
                    "service-quotas", "get_service_quota", ServiceCode="ec2", QuotaCode=need.code
                ).get("Quota", {})
                allowed = float(answer["Value"]) if "Value" in answer else None
            except CloudError as error:
                if error.refusal in (CloudRefusal.NO_CREDENTIALS, CloudRefusal.EXPIRED):
                    raise
                allowed = None
            checks.append(check_quota(need, allowed))
        return checks

    # Keys, scripts, repositories
    def has_key(self, name: str) -> bool:
        try:
            self.api.call("ec2", "describe_key_pairs", KeyNames=[name])
        except CloudError as error:
            if error.refusal is CloudRefusal.NOT_THERE:
                return False
            raise
        return True

    def create_key(self, name: str, file: Path) -> None:
        """Create a key pair, and write its private key to a file that only the owner can read."""
        answer = self.api.call("ec2", "create_key_pair", KeyName=name, KeyType="ed25519", KeyFormat="pem")
        make_folder(file.parent, 0o700)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(handle, "w", encoding="utf-8") as opened:
            opened.write(str(answer["KeyMaterial"]))

    def upload(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """Write objects to a bucket of this account. Scripts in a bucket of others would run as root on our nodes."""
        owner = caller_account(self.api)
        for key, data in objects.items():
            self.api.call("s3", "put_object", Bucket=bucket, Key=key, Body=data, ExpectedBucketOwner=owner)

    def repositories(self, file_system: str) -> dict[str, str]:
        """Return the state of each data repository association of a file system, by its S3 address."""
        filters = [{"Name": "file-system-id", "Values": [file_system]}]
        answer = self.api.call("fsx", "describe_data_repository_associations", Filters=filters)
        return {
            str(each.get("DataRepositoryPath", "")).rstrip("/"): str(each.get("Lifecycle", ""))
            for each in answer.get("Associations", ())
        }

    def add_repository(self, file_system: str, repository: DataRepository, say: Say) -> None:
        """Associate a folder with a bucket, and wait until it is AVAILABLE."""
        wanted = repository.s3.rstrip("/")
        if wanted not in self.repositories(file_system):
            policies = {
                "AutoImportPolicy": {"Events": list(repository.import_events)},
                "AutoExportPolicy": {"Events": list(repository.export_events)},
            }
            self.api.call(
                "fsx",
                "create_data_repository_association",
                FileSystemId=file_system,
                FileSystemPath=repository.path,
                DataRepositoryPath=repository.s3,
                BatchImportMetaDataOnCreate=True,
                S3={name: each for name, each in policies.items() if each["Events"]},
            )
        while True:
            state = self.repositories(file_system).get(wanted, "")
            if state == "AVAILABLE":
                return
            if state in ("FAILED", "MISCONFIGURED", "DELETING"):
                raise TargetError(
                    f"the data repository {repository.s3} is {state}",
                    hint="check that the bucket exists in this region and that FSx may read and write it",
                )
            say(f"data repository {repository.s3}: {state or 'not there yet'}")
            self._pause(POLL_S)
