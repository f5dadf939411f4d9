"""Send requests to HyperPod, CloudWatch, S3, FSx and Managed Prometheus.

Each request is first checked against AWS's service model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dalsegno.errors import TargetError
from dalsegno.spec.facts import Storage
from dalsegno.targets.cloud.aws import Answers, AwsApi, caller_account
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal
from dalsegno.targets.cloud.service_model import check_request
from dalsegno.targets.hyperpod.answers import (
    ClusterDescription,
    InstanceInfo,
    SharedFileSystem,
    read_cluster,
    read_instances,
)
from dalsegno.targets.hyperpod.changes import TagChange
from dalsegno.targets.hyperpod.requests import batches

LUSTRE_MB_PER_S_PER_TIB = 250
MOST_LOG_PAGES = 20
_GIB = 1024


class FileSystemState(Enum):
    """The state of an FSx file system, which the API calls Lifecycle."""

    CREATING = "CREATING"
    AVAILABLE = "AVAILABLE"
    FAILED = "FAILED"
    DELETING = "DELETING"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class FileSystem:
    """An FSx file system."""

    id: str
    state: FileSystemState
    dns_name: str
    mount_name: str = ""
    message: str = ""

    def mounted_at(self, mount: str) -> SharedFileSystem:
        return SharedFileSystem(self.dns_name, mount, self.mount_name)


@dataclass(frozen=True)
class BatchFailure:
    """A node for which a batch request failed."""

    node: str
    code: str
    message: str


class HyperPodApi:
    """Sends the target's requests through `aws`, which classifies refusals."""

    def __init__(self, aws: AwsApi) -> None:
        self.aws = aws
        self._account = ""

    def _call(self, service: str, operation: str, request: Mapping[str, Any]) -> Answers:
        check_request(service, operation, request)
        return self.aws.call(service, _method(operation), **request)

    # Requests about clusters

    def create(self, request: Mapping[str, Any]) -> str:
        """Start the creation of a cluster and return its ARN."""
        return str(self._call("sagemaker", "CreateCluster", request)["ClusterArn"])

    def update(self, request: Mapping[str, Any]) -> None:
        """Start a change of a cluster."""
        self._call("sagemaker", "UpdateCluster", request)

    def find(self, name: str) -> ClusterDescription | None:
        """Return a cluster; None if there is none with this name."""
        listed = self._pages("sagemaker", "ListClusters", {"NameContains": name}, "ClusterSummaries")
        if not any(each.get("ClusterName") == name for each in listed):
            return None
        try:
            return read_cluster(self._call("sagemaker", "DescribeCluster", {"ClusterName": name}))
        except CloudError as error:
            if error.refusal is CloudRefusal.NOT_THERE:  # deleted between the two requests
                return None
            raise

    def tags(self, arn: str) -> dict[str, str] | None:
        """Return the tags of a cluster; None if this user may not read them."""
        try:
            listed = list(self._pages("sagemaker", "ListTags", {"ResourceArn": arn}, "Tags"))
        except CloudError as error:
            if error.refusal is CloudRefusal.DENIED:
                return None
            raise
        return {str(each["Key"]): str(each["Value"]) for each in listed}

    def change_tags(self, arn: str, change: TagChange) -> None:
        if change.set:
            tags = [{"Key": key, "Value": value} for key, value in change.set.items()]
            self._call("sagemaker", "AddTags", {"ResourceArn": arn, "Tags": tags})
        if change.remove:
            self._call("sagemaker", "DeleteTags", {"ResourceArn": arn, "TagKeys": list(change.remove)})

    def instances(self, name: str) -> list[InstanceInfo]:
        return read_instances(
            self._pages("sagemaker", "ListClusterNodes", {"ClusterName": name}, "ClusterNodeSummaries")
        )

    def delete(self, name: str) -> None:
        """Start the deletion of a cluster. Do nothing if there is no cluster with this name."""
        try:
            self._call("sagemaker", "DeleteCluster", {"ClusterName": name})
        except CloudError as error:
            if error.refusal is not CloudRefusal.NOT_THERE and self.find(name) is not None:
                raise

    def replace(self, name: str, ids: Sequence[str]) -> list[BatchFailure]:
        """Replace instances, with at most 25 in one request, and return those that failed. HyperPod refuses to replace
        the controller."""
        return self._batch("BatchReplaceClusterNodes", name, ids)

    def reboot(self, name: str, ids: Sequence[str]) -> list[BatchFailure]:
        return self._batch("BatchRebootClusterNodes", name, ids)

    def _batch(self, operation: str, name: str, ids: Sequence[str]) -> list[BatchFailure]:
        failed: list[BatchFailure] = []
        for part in batches(ids):
            answer = self._call("sagemaker", operation, {"ClusterName": name, "NodeIds": part})
            failed += [
                BatchFailure(str(each["NodeId"]), str(each.get("ErrorCode", "")), str(each.get("Message", "")))
                for each in answer.get("Failed") or ()
            ]
        return failed

    def _pages(self, service: str, operation: str, request: Mapping[str, Any], key: str) -> Iterator[Mapping[str, Any]]:
        token = ""
        while True:
            answer = self._call(service, operation, {**request, **({"NextToken": token} if token else {})})
            yield from answer.get(key) or ()
            token = str(answer.get("NextToken") or "")
            if not token:
                return

    # Requests about logs in CloudWatch

    def log_streams(self, group: str) -> list[str]:
        """Return the names of the log streams of a group; none if the group does not exist."""
        found: list[str] = []
        request: dict[str, Any] = {"logGroupName": group}
        while True:
            try:
                answer = self._call("logs", "DescribeLogStreams", request)
            except CloudError as error:
                if error.refusal is CloudRefusal.NOT_THERE:
                    return []
                raise
            found += [str(each["logStreamName"]) for each in answer.get("logStreams") or ()]
            if not answer.get("nextToken"):
                return found
            request["nextToken"] = answer["nextToken"]

    def log_text(self, group: str, stream: str) -> str:
        """Return the lines of a log stream, from at most MOST_LOG_PAGES answers of about a megabyte each."""
        request: dict[str, Any] = {"logGroupName": group, "logStreamName": stream, "startFromHead": True}
        lines: list[str] = []
        for _ in range(MOST_LOG_PAGES):
            answer = self._call("logs", "GetLogEvents", request)
            lines += [str(each.get("message", "")) for each in answer.get("events") or ()]
            token = answer.get("nextForwardToken")
            if not token or token == request.get("nextToken"):  # if the token is repeated, there are no more lines
                break
            request["nextToken"] = token
        return "".join(f"{line}\n" for line in lines)

    # Requests about lifecycle scripts in S3

    def has_bucket(self, bucket: str) -> bool:
        try:
            self._call("s3", "HeadBucket", self._own(bucket))
        except CloudError as error:
            if error.refusal is CloudRefusal.NOT_THERE:
                return False
            raise
        return True

    def _own(self, bucket: str) -> dict[str, str]:
        """Return the parameters with which S3 refuses a bucket of another account.

        Scripts in such a bucket would run as root on our nodes.
        """
        if not self._account:
            self._account = caller_account(self.aws)
        return {"Bucket": bucket, "ExpectedBucketOwner": self._account}

    def create_bucket(self, bucket: str, region: str) -> None:
        """Create a bucket that the public cannot read."""
        place = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        self._call("s3", "CreateBucket", {"Bucket": bucket, **place})
        closed = {"BlockPublicAcls": True, "IgnorePublicAcls": True, "BlockPublicPolicy": True}
        closed["RestrictPublicBuckets"] = True
        self._call("s3", "PutPublicAccessBlock", {**self._own(bucket), "PublicAccessBlockConfiguration": closed})

    def upload(self, bucket: str, prefix: str, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            encrypted = {"Body": content, "ServerSideEncryption": "AES256"}
            self._call("s3", "PutObject", {**self._own(bucket), "Key": f"{prefix}/{name}", **encrypted})

    def remove_uploads(self, bucket: str, prefix: str, names: Sequence[str]) -> None:
        """Delete uploaded files, but not the bucket. Missing files are not an error."""
        for name in names:
            try:
                self._call("s3", "DeleteObject", {**self._own(bucket), "Key": f"{prefix}/{name}"})
            except CloudError as error:
                if error.refusal is not CloudRefusal.NOT_THERE:
                    raise

    # Requests about workspaces of Amazon Managed Service for Prometheus

    def find_workspace(self, alias: str) -> str:
        """Return the id of the workspace with this alias; "" if there is none."""
        listed = self._call("amp", "ListWorkspaces", {"alias": alias}).get("workspaces") or ()
        return next((str(each["workspaceId"]) for each in listed if each.get("alias") == alias), "")

    def create_workspace(self, alias: str) -> str:
        """Start the creation of a workspace and return its id. Repeating the request creates no second one."""
        return str(self._call("amp", "CreateWorkspace", {"alias": alias, "clientToken": alias})["workspaceId"])

    def workspace(self, id: str) -> tuple[str, str]:
        """Return the state and the endpoint of a workspace."""
        found = self._call("amp", "DescribeWorkspace", {"workspaceId": id})["workspace"]
        return str((found.get("status") or {}).get("statusCode", "")), str(found.get("prometheusEndpoint") or "")

    def training_plan(self, arn: str) -> Answers:
        return self._call("sagemaker", "DescribeTrainingPlan", {"TrainingPlanName": arn})

    # Requests about file systems

    def file_system(self, id: str) -> FileSystem | None:
        """Return an FSx file system; None if it does not exist."""
        try:
            answer = self._call("fsx", "DescribeFileSystems", {"FileSystemIds": [id]})
        except CloudError as error:
            if error.refusal is CloudRefusal.NOT_THERE:
                return None
            raise
        return next((_file_system(each) for each in answer.get("FileSystems") or ()), None)

    def create_lustre(self, storage: Storage, cluster: str, subnet: str, groups: Sequence[str]) -> FileSystem:
        """Start the creation of an FSx for Lustre file system, and return the file system. A repeated request does not
        create a second one."""
        request = {
            "ClientRequestToken": f"dalsegno-{cluster}-{storage.name}",
            "FileSystemType": "LUSTRE",
            "StorageCapacity": (storage.size_mib or 0) // _GIB,
            "SubnetIds": [subnet],
            "SecurityGroupIds": list(groups),
            "Tags": [{"Key": "Name", "Value": f"{cluster}-{storage.name}"}],
            "LustreConfiguration": {
                "DeploymentType": "PERSISTENT_2",
                "PerUnitStorageThroughput": storage.throughput_mb_per_s_per_tib or LUSTRE_MB_PER_S_PER_TIB,
                "DataCompressionType": "LZ4",
            },
        }
        return _file_system(self._call("fsx", "CreateFileSystem", request)["FileSystem"])

    def delete_file_system(self, id: str) -> bool:
        """Delete a file system with all its files. Return False if it does not exist."""
        try:
            self._call("fsx", "DeleteFileSystem", {"FileSystemId": id})
        except CloudError as error:
            if error.refusal is CloudRefusal.NOT_THERE:
                return False
            raise
        return True


def _file_system(answer: Mapping[str, Any]) -> FileSystem:
    value = answer.get("Lifecycle")
    known = {each.value: each for each in FileSystemState}
    return FileSystem(
        id=str(answer.get("FileSystemId", "")),
        state=known.get(str(value), FileSystemState.UNKNOWN),
        dns_name=str(answer.get("DNSName") or ""),
        mount_name=str((answer.get("LustreConfiguration") or {}).get("MountName") or ""),
        message=str((answer.get("FailureDetails") or {}).get("Message") or ""),
    )


def _method(operation: str) -> str:
    """Return boto3's method name for an operation, such as create_cluster for CreateCluster."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", operation).lower()


def refuse_failures(action: str, failed: Sequence[BatchFailure]) -> None:
    """Raise an error if a batch request failed for some nodes."""
    if failed:
        first = failed[0]
        raise TargetError(
            f"HyperPod did not {action} {', '.join(each.node for each in failed)}: {first.code} {first.message}",
            hint="`dalsegno nodes` shows the state of each instance",
        )
