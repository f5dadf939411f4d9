"""Read and change the AWS resources of a cluster: stacks, file systems, reservations, quotas, key pairs, S3 objects."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dalsegno.spec.aws_facts import PclusterSettings
from dalsegno.system.files import make_folder
from dalsegno.targets.base import Say
from dalsegno.targets.cloud.aws import AwsApi, caller_account
from dalsegno.targets.cloud.consequences import CapacityCheck
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal
from dalsegno.targets.cloud.progress import OperationReport, OperationState, follow
from dalsegno.targets.cloud.stacks import describe_stack, read_template, report_stack, start_deletion
from dalsegno.targets.parallelcluster.plan import CapacityReservation, check_quota, parse_reservation, quota_needs
from dalsegno.targets.parallelcluster.stack_changes import (
    FILE_SYSTEM,
    NETWORK,
    OwnStack,
    drops_data,
    keep_all,
    keep_data,
    of_type,
)

Pause = Callable[[float], None]


class AwsResources:
    """Reads and changes the resources of one cluster, through an `AwsApi`."""

    def __init__(self, api: AwsApi, logs: Path, pause: Pause = time.sleep) -> None:
        self.api, self._logs, self._pause = api, logs, pause

    # Stacks of CloudFormation
    def outputs(self, stack: str) -> dict[str, str] | None:
        """Return the outputs of a stack; None if it does not exist or was deleted."""
        found = describe_stack(self.api, stack)
        return None if found.state is OperationState.GONE else dict(found.outputs)

    def read_stack(self, stack: str) -> OwnStack:
        """Return a stack of ours with its template and the ids of its resources; an empty one if it does not exist."""
        found = describe_stack(self.api, stack)
        if found.state is OperationState.GONE:
            return OwnStack()
        status = found.status
        listed = self.api.call("cloudformation", "describe_stack_resources", StackName=stack).get("StackResources", ())
        return OwnStack(
            found.state,
            complete=status == "CREATE_COMPLETE" or status.startswith("UPDATE_"),
            creating=status == "CREATE_IN_PROGRESS",
            unused=status.startswith(("CREATE_FAILED", "ROLLBACK_")),
            outputs=found.outputs,
            template=read_template(self.api, stack),
            ids={str(each.get("LogicalResourceId", "")): str(each.get("PhysicalResourceId", "")) for each in listed},
        )

    def put_stack(self, stack: str, template: Mapping[str, Any], tags: Mapping[str, str], say: Say) -> OwnStack:
        """Create or update a stack, wait until that operation ends, and return the stack.

        An update never deletes a file system or a bucket. A stack whose creation or deletion failed is deleted and
        created again. After a failed creation, its file systems are deleted, too.
        """
        found = self.read_stack(stack)
        if found.state is OperationState.RUNNING:
            self._follow(stack, say)  # the operation of an interrupted `up`, perhaps with another template
            found = self.read_stack(stack)
        if found.state is OperationState.FAILED and not found.complete:
            say(f"removing what a failed creation or deletion of stack {stack} left")
            if found.unused:
                self.delete_file_systems(found.file_systems.values(), say)
            self.delete_stack(stack, say)
            found = OwnStack()
        if found.exists:
            protected = keep_data(found.template)
            if protected != found.template and drops_data(found.template, template):
                self._update(stack, protected, tags, say)
            self._update(stack, template, tags, say)
        else:
            request = _stack_request(stack, template, tags)
            self.api.call("cloudformation", "create_stack", **request, OnFailure="DO_NOTHING")
            self._follow(stack, say)
        return self.read_stack(stack)

    def _update(self, stack: str, template: Mapping[str, Any], tags: Mapping[str, str], say: Say) -> None:
        """Update a stack, and wait until the update ends. Do nothing if the stack already has this template."""
        try:
            self.api.call("cloudformation", "update_stack", **_stack_request(stack, template, tags))
        except CloudError as error:
            # CloudFormation has one error code both for a template without changes and for an invalid one.
            if error.refusal is not CloudRefusal.INVALID or read_template(self.api, stack) != template:
                raise
            return
        self._follow(stack, say)

    def _follow(self, stack: str, say: Say) -> None:
        follow(f"stack {stack}", lambda: report_stack(self.api, stack), say, self._logs, pause=self._pause)

    def delete_stack(self, stack: str, say: Say) -> bool:
        """Delete a stack, but keep its file systems and buckets; return False if there was no stack."""
        if not start_deletion(self.api, stack):
            return False
        what = f"deletion of stack {stack}"
        follow(what, lambda: report_stack(self.api, stack), say, self._logs, pause=self._pause)
        return True

    def remove(self, stack: str, recorded: Iterable[str], kept: Collection[str], say: Say) -> None:
        """Delete a stack and its file systems with all files, and the file systems in `recorded`.

        Missing resources are not an error. The file systems in `kept` stay, with the network that they are in.
        """
        found = self.read_stack(stack)
        if found.creating and of_type(found.template, FILE_SYSTEM):
            with suppress(CloudError):  # a file system that is still being created cannot be deleted
                self._follow(stack, say)
            found = self.read_stack(stack)
        listed = dict.fromkeys([*recorded, *found.file_systems.values()])
        self.delete_file_systems([id for id in listed if id not in kept], say)
        left = [id for id in kept if self._file_system(id) is not None]
        names = {*NETWORK, *(name for name, id in found.file_systems.items() if id in kept)}
        protected = keep_all(found.template, names) if left and found.complete else found.template
        if protected != found.template:
            say(f"keeping the network of {', '.join(left)}")
            self._update(stack, protected, {}, say)
        self.delete_stack(stack, say)

    # File systems and buckets
    def has_bucket(self, bucket: str, account: str) -> bool:
        """Return whether a bucket exists, belongs to this account, and can be accessed."""
        try:
            self.api.call("s3", "head_bucket", Bucket=bucket, ExpectedBucketOwner=account)
        except CloudError as error:
            if error.refusal in (CloudRefusal.NOT_THERE, CloudRefusal.DENIED):
                return False
            raise
        return True

    def _file_system(self, id: str) -> Mapping[str, Any] | None:
        try:
            found = self.api.call("fsx", "describe_file_systems", FileSystemIds=[id]).get("FileSystems", ())
        except CloudError as error:
            if error.refusal is not CloudRefusal.NOT_THERE:
                raise
            return None
        return next(iter(found), None)

    def delete_file_systems(self, ids: Iterable[str], say: Say) -> None:
        """Delete file systems with all their files, and wait until they no longer exist.

        Their network cannot be deleted before that.
        """
        started = [id for id in ids if self._start_deletion(id, say)]
        for id in started:
            follow(f"deletion of file system {id}", partial(self._deletion, id), say, self._logs, pause=self._pause)

    def _start_deletion(self, id: str, say: Say) -> bool:
        found = self._file_system(id)
        if found is None:
            return False
        if found.get("Lifecycle") != "DELETING":
            say(f"deleting file system {id}")
            # By default, AWS makes a last backup of an OpenZFS file system, which costs money. AWS also refuses to
            # delete a file system that has child volumes.
            zfs = {"SkipFinalBackup": True, "Options": ["DELETE_CHILD_VOLUMES_AND_SNAPSHOTS"]}
            options = {"OpenZFSConfiguration": zfs} if found.get("FileSystemType") == "OPENZFS" else {}
            self.api.call("fsx", "delete_file_system", FileSystemId=id, **options)
        return True

    def _deletion(self, id: str) -> OperationReport:
        found = self._file_system(id)
        if found is None:
            return OperationReport(OperationState.GONE)
        if found.get("Lifecycle") != "FAILED":
            return OperationReport(OperationState.RUNNING)
        message = str((found.get("FailureDetails") or {}).get("Message", ""))
        return OperationReport(OperationState.FAILED, message=message)

    # Reservations, subnets, quotas
    def reservations(self, own: PclusterSettings) -> dict[str, CapacityReservation]:
        """Return the capacity reservations that the queues name and that exist, by id.

        There is one request for each, because EC2 refuses a request in which one reservation does not exist.
        """
        wanted = sorted({queue.capacity_reservation for queue in own.queues if queue.capacity_reservation})
        found: list[CapacityReservation] = []
        for id in wanted:
            try:
                answer = self.api.call("ec2", "describe_capacity_reservations", CapacityReservationIds=[id])
            except CloudError as error:
                if error.refusal is not CloudRefusal.NOT_THERE:
                    raise
                continue
            found += [parse_reservation(each) for each in answer.get("CapacityReservations", ())]
        return {each.id: each for each in found}

    def zones(self, subnets: Iterable[str]) -> dict[str, str]:
        """Return the availability zone of each subnet."""
        wanted = sorted(set(subnets))
        if not wanted:
            return {}
        answer = self.api.call("ec2", "describe_subnets", SubnetIds=wanted)
        return {str(each["SubnetId"]): str(each["AvailabilityZone"]) for each in answer.get("Subnets", ())}

    def quotas(self, own: PclusterSettings) -> list[CapacityCheck]:
        """Compare the account's quotas with what the cluster needs. If a quota cannot be read, the user must check
        it."""
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

    # Keys and scripts
    def key_type(self, name: str) -> str:
        """Return the type of a key pair in EC2, such as `rsa`, or `unknown`; "" if the key pair does not exist."""
        try:
            found = self.api.call("ec2", "describe_key_pairs", KeyNames=[name]).get("KeyPairs", ())
        except CloudError as error:
            if error.refusal is CloudRefusal.NOT_THERE:
                return ""
            raise
        return next((str(each.get("KeyType", "")) for each in found), "") or "unknown"

    def create_key(self, name: str, file: Path) -> None:
        """Create a key pair, and write its private key to a file that only the owner can read."""
        answer = self.api.call("ec2", "create_key_pair", KeyName=name, KeyType="ed25519", KeyFormat="pem")
        make_folder(file.parent, 0o700)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(handle, "w", encoding="utf-8") as opened:
            opened.write(str(answer["KeyMaterial"]))

    def upload(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """Write objects to a bucket of this account. A bucket of another account is refused, because its scripts would
        run as root on our nodes."""
        owner = caller_account(self.api)
        for key, data in objects.items():
            self.api.call("s3", "put_object", Bucket=bucket, Key=key, Body=data, ExpectedBucketOwner=owner)


def _stack_request(stack: str, template: Mapping[str, Any], tags: Mapping[str, str]) -> dict[str, Any]:
    return {
        "StackName": stack,
        "TemplateBody": json.dumps(template),
        "Capabilities": ["CAPABILITY_IAM"],
        **({"Tags": [{"Key": key, "Value": value} for key, value in tags.items()]} if tags else {}),
    }
