"""Check what the cluster file refers to on AWS: buckets of data, scripts, placement groups, and secrets with passwords.

ParallelCluster only warns about a script or a secret that does not exist. The nodes fail later, when they boot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from dalsegno.spec.aws_facts import DataRepository, PclusterSettings
from dalsegno.targets.cloud.aws import AwsApi
from dalsegno.targets.cloud.consequences import CapacityCheck
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal

UNREADABLE = "your credentials may not read it, so it was not checked"


class Existence(Enum):
    """Whether a resource exists. `DENIED` means that our credentials may not find out."""

    THERE = "there"
    MISSING = "missing"
    DENIED = "denied"


@dataclass(frozen=True)
class DataBuckets:
    """The buckets of the data repositories: those to create, and a check for each that cannot be used."""

    missing: tuple[str, ...] = ()
    checks: tuple[CapacityCheck, ...] = ()


def bucket_of(uri: str) -> str:
    """Return the bucket of an S3 address."""
    return uri.removeprefix("s3://").partition("/")[0]


def find_data_buckets(api: AwsApi, repositories: Iterable[DataRepository]) -> DataBuckets:
    """Ask S3 for the bucket of each data repository. It may belong to another account that shares it with ours."""
    found = {name: _bucket(api, name) for name in dict.fromkeys(bucket_of(each.s3) for each in repositories)}
    fault = "it belongs to another account, or your credentials may not use it; FSx could not link it"
    return DataBuckets(
        tuple(name for name, there in found.items() if there is Existence.MISSING),
        tuple(CapacityCheck(f"bucket {name}", "", fault) for name, there in found.items() if there is Existence.DENIED),
    )


def check_references(api: AwsApi, own: PclusterSettings) -> Iterator[CapacityCheck]:
    """Yield a check for each script in S3, each secret and each placement group that the cluster file names."""
    for uri in dict.fromkeys(each.script for each in own.actions if each.script.startswith("s3://")):
        yield _check(f"script {uri}", "it does not exist; new machines would fail", _script(api, uri))
    secrets = [each.password_secret for each in (own.database, own.directory) if each is not None]
    for arn in dict.fromkeys(secrets):
        yield _check(f"secret {arn}", "it does not exist in this region, or is being deleted", _secret(api, arn))
    for name in dict.fromkeys(queue.placement_group_name for queue in own.queues if queue.placement_group_name):
        yield _check(f"placement group {name}", "it does not exist with strategy `cluster`", _group(api, name))


def _check(what: str, fault: str, there: Existence) -> CapacityCheck:
    wanted = UNREADABLE if there is Existence.DENIED else "it exists"
    return CapacityCheck(what, wanted, fault if there is Existence.MISSING else "")


def _bucket(api: AwsApi, name: str) -> Existence:
    return _ask(lambda: api.call("s3", "head_bucket", Bucket=name))


def _script(api: AwsApi, uri: str) -> Existence:
    bucket = bucket_of(uri)
    return _ask(lambda: api.call("s3", "head_object", Bucket=bucket, Key=uri.removeprefix(f"s3://{bucket}/")))


def _secret(api: AwsApi, arn: str) -> Existence:
    found: dict[str, object] = {}

    def describe() -> None:
        found.update(api.call("secretsmanager", "describe_secret", SecretId=arn))

    there = _ask(describe)
    return Existence.MISSING if "DeletedDate" in found else there


def _group(api: AwsApi, name: str) -> Existence:
    found: list[Mapping[str, object]] = []

    def describe() -> None:
        found.extend(api.call("ec2", "describe_placement_groups", GroupNames=[name]).get("PlacementGroups", ()))

    there = _ask(describe)
    usable = any(each.get("Strategy") == "cluster" and each.get("State") == "available" for each in found)
    return Existence.MISSING if there is Existence.THERE and not usable else there


def _ask(request: Callable[[], object]) -> Existence:
    try:
        request()
    except CloudError as error:
        if error.refusal is CloudRefusal.NOT_THERE:
            return Existence.MISSING
        if error.refusal is CloudRefusal.DENIED:
            return Existence.DENIED
        raise
    return Existence.THERE
