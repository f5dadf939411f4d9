"""An account of AWS in memory, for tests of targets: stacks, file systems, buckets, keys, objects, data repositories.

Every request is checked against botocore's model of the service. CloudFormation's part deletes what a template lacks
and replaces what cannot change, unless a policy of the template in force says `Retain`. The sets of properties below
are from AWS's documentation. The account proves nothing about AWS; it shows what our requests would do under its rules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from botocore import xform_name
from botocore.session import get_session

from dalsegno.targets.cloud.credentials import CloudRefusal, explain
from dalsegno.targets.cloud.service_model import check_request

IDS = {
    "AWS::EC2::VPC": "vpc-0123456789abcdef0",
    "AWS::EC2::SecurityGroup": "sg-0123456789abcdef0",
    "AWS::IAM::ManagedPolicy": "arn:aws:iam::123456789012:policy/nodes",
}
POLICIES = ("DeletionPolicy", "UpdateReplacePolicy")
REPLACED = {  # properties whose change makes CloudFormation create another resource
    "AWS::FSx::FileSystem": {"FileSystemType", "FileSystemTypeVersion", "SecurityGroupIds", "StorageType", "SubnetIds",
                             "LustreConfiguration"},
    "AWS::S3::Bucket": {"BucketName"},
    "AWS::EC2::Subnet": {"AvailabilityZone", "AvailabilityZoneId", "CidrBlock", "VpcId"},
    "AWS::EC2::VPC": {"CidrBlock"},
}  # fmt: skip
IN_THE_WAY = ("Vpc", "PrivateSubnet", "EfaSecurityGroup")  # what cannot be deleted while a file system is in it
Json = dict[str, Any]


@cache
def operations(service: str) -> Mapping[str, str]:
    """Return the names of a service's operations, by the name of boto3's method."""
    return {xform_name(name): name for name in get_session().get_service_model(service).operation_names}


@dataclass
class FakeAccount:
    """The state of the account. `refusals` are raised once each, in order, by the operation they name."""

    stacks: dict[str, Json] = field(default_factory=dict)
    file_systems: dict[str, Json] = field(default_factory=dict)
    backups: list[str] = field(default_factory=list)
    buckets: set[str] = field(default_factory=set)
    objects: dict[str, bytes] = field(default_factory=dict)
    secrets: dict[str, Json] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)  # placement groups: name -> strategy
    keys: dict[str, str] = field(default_factory=dict)  # name -> type
    associations: list[Json] = field(default_factory=list)
    association_ends: list[tuple[str, str]] = field(default_factory=list)  # how the next ones end: state, message
    reservations: list[Json] = field(default_factory=list)
    quota: float = 10_000.0
    zone: str = "us-east-1a"
    stack_fails: str = ""
    bucket_owner: str = "123456789012"
    refusals: list[tuple[str, CloudRefusal]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def call(self, service: str, operation: str, **parameters: Any) -> Mapping[str, Any]:
        self.calls.append(operation)
        check_request(service, operations(service)[operation], parameters)
        if self.refusals and self.refusals[0][0] == operation:
            raise explain(self.refusals.pop(0)[1], f"AWS {service} {operation}", "as the test asked")
        found: Mapping[str, Any] = getattr(self, f"do_{operation}")(**parameters)
        return found

    def do_get_caller_identity(self) -> Mapping[str, Any]:
        return {"Account": "123456789012"}

    # CloudFormation

    def do_create_stack(self, StackName: str, TemplateBody: str, **_: Any) -> Mapping[str, Any]:
        template = json.loads(TemplateBody)
        stack = self.stacks[StackName] = {"template": template, "ids": {}, "verb": "CREATE", "fails": self.stack_fails}
        for name, resource in template["Resources"].items():
            self._create(stack, StackName, name, resource)
        stack["todo"] = ["CREATE_IN_PROGRESS", "CREATE_FAILED" if stack["fails"] else "CREATE_COMPLETE"]
        return {}

    def _create(self, stack: Json, stack_name: str, name: str, resource: Json) -> None:
        kind, own = resource["Type"], resource.get("Properties", {})
        id = IDS.get(kind, name)
        if kind == "AWS::EC2::Subnet":
            id = f"subnet-0{'a' if name == 'PublicSubnet' else 'b'}23456789abcdef0"
        if kind == "AWS::FSx::FileSystem":
            id = f"fs-0123456789abcdef{len(self.file_systems)}"
            self.file_systems[id] = {
                "FileSystemId": id, "FileSystemType": own["FileSystemType"], "Lifecycle": "AVAILABLE",
                "stack": stack_name if own["SubnetIds"] == [{"Ref": "PrivateSubnet"}] else "",
                "files": f"files of {name}",
            }  # fmt: skip
        if kind == "AWS::S3::Bucket":
            id = own["BucketName"]
            if id in self.buckets:
                stack["fails"] = f"{id} already exists"
            self.buckets.add(id)
        stack["ids"][name] = id

    def _delete(self, stack: Json, name: str, kind: str, policy: str | None) -> None:
        id = stack["ids"].pop(name)
        if policy != "Retain":
            self.file_systems.pop(id, None)
            if kind == "AWS::S3::Bucket":
                self.buckets.discard(id)

    def do_update_stack(self, StackName: str, TemplateBody: str, **_: Any) -> Mapping[str, Any]:
        stack, new = self.stacks[StackName], json.loads(TemplateBody)
        old, changed = stack["template"], new["Resources"]
        if without_policies(old) == without_policies(new):
            raise explain(CloudRefusal.INVALID, "update-stack", "No updates are to be performed.", "ValidationError")
        stack |= {"template": new, "todo": ["UPDATE_IN_PROGRESS", "UPDATE_COMPLETE"], "verb": "UPDATE", "fails": ""}
        for name, resource in old["Resources"].items():
            kind = resource["Type"]
            if name not in changed:
                self._delete(stack, name, kind, resource.get("DeletionPolicy"))
            elif any(
                resource["Properties"].get(each) != changed[name]["Properties"].get(each)
                for each in REPLACED.get(kind, ())
            ):
                self._delete(stack, name, kind, changed[name].get("UpdateReplacePolicy"))
                self._create(stack, StackName, name, changed[name])
        for name in [each for each in changed if each not in old["Resources"]]:
            self._create(stack, StackName, name, changed[name])
        if stack["fails"]:
            stack["todo"] = ["UPDATE_IN_PROGRESS", "UPDATE_ROLLBACK_COMPLETE"]
        return {}

    def do_get_template(self, StackName: str) -> Mapping[str, Any]:
        return {"TemplateBody": self.stacks[StackName]["template"]}

    def do_delete_stack(self, StackName: str) -> Mapping[str, Any]:
        stack = self.stacks[StackName]
        stack |= {"verb": "DELETE", "fails": ""}
        resources = stack["template"]["Resources"]
        for name in [each for each in resources if each in stack["ids"] and each not in IN_THE_WAY]:
            self._delete(stack, name, resources[name]["Type"], resources[name].get("DeletionPolicy"))
        stuck = [name for name in IN_THE_WAY if name in resources and "DeletionPolicy" not in resources[name]]
        if stuck and any(each["stack"] == StackName for each in self.file_systems.values()):
            stack["fails"] = f"{', '.join(stuck)} has dependencies and cannot be deleted"
        stack["todo"] = ["DELETE_IN_PROGRESS", "DELETE_FAILED" if stack["fails"] else "DELETE_COMPLETE"]
        return {}

    def do_describe_stacks(self, StackName: str) -> Mapping[str, Any]:
        stack = self.stacks.get(StackName)
        if stack is None:
            raise explain(CloudRefusal.INVALID, "describe-stacks", f"Stack with id {StackName} does not exist")
        if stack["todo"]:
            stack["status"] = stack["todo"].pop(0)
        if stack["status"] == "DELETE_COMPLETE":
            del self.stacks[StackName]
        outputs = [
            {"OutputKey": key, "OutputValue": self._value(each["Value"], stack)}
            for key, each in stack["template"].get("Outputs", {}).items()
        ]
        return {"Stacks": [{"StackName": StackName, "StackStatus": stack["status"], "Outputs": outputs}]}

    def do_describe_stack_resources(self, StackName: str) -> Mapping[str, Any]:
        ids = self.stacks[StackName]["ids"]
        return {"StackResources": [{"LogicalResourceId": name, "PhysicalResourceId": id} for name, id in ids.items()]}

    def do_describe_stack_events(self, StackName: str) -> Mapping[str, Any]:
        stack = self.stacks[StackName]
        verb = stack["verb"]
        found = [{"EventId": "1", "LogicalResourceId": "Vpc", "ResourceType": "AWS::EC2::VPC",
                  "ResourceStatus": f"{verb}_IN_PROGRESS"}]  # fmt: skip
        if stack["fails"]:
            found.append({**found[0], "EventId": "2", "ResourceStatus": f"{verb}_FAILED",
                          "ResourceStatusReason": stack["fails"]})  # fmt: skip
        return {"StackEvents": found[::-1]}

    @staticmethod
    def _value(value: Any, stack: Json) -> str:
        if isinstance(value, str):
            return value
        name = value["Fn::GetAtt"][0] if "Fn::GetAtt" in value else value["Ref"]
        id = str(stack["ids"].get(name, ""))
        return id.replace("fs-", "fsvol-") if "Fn::GetAtt" in value else id

    # FSx

    def _found(self, id: str) -> Json:
        if id not in self.file_systems:
            raise explain(CloudRefusal.NOT_THERE, "describe-file-systems", code="FileSystemNotFound")
        return self.file_systems[id]

    def do_describe_file_systems(self, FileSystemIds: list[str]) -> Mapping[str, Any]:
        found = [dict(self._found(id)) for id in FileSystemIds]
        for each in found:
            if each["Lifecycle"] == "DELETING":  # the file system is shown as DELETING only once
                del self.file_systems[each["FileSystemId"]]
        return {"FileSystems": found}

    def do_delete_file_system(self, FileSystemId: str, **options: Any) -> Mapping[str, Any]:
        found = self._found(FileSystemId)
        zfs = options.get("OpenZFSConfiguration", {})
        if found["FileSystemType"] == "OPENZFS" and not zfs.get("SkipFinalBackup"):
            self.backups.append(FileSystemId)
        found["Lifecycle"] = "DELETING"
        return {"FileSystemId": FileSystemId, "Lifecycle": "DELETING"}

    @property
    def repositories(self) -> dict[str, str]:
        """The state of each data repository association, by its address."""
        return {each["DataRepositoryPath"]: each["Lifecycle"] for each in self.associations}

    def do_describe_data_repository_associations(self, Filters: list[Json]) -> Mapping[str, Any]:
        (wanted,) = Filters
        assert wanted["Name"] == "file-system-id"
        own = [each for each in self.associations if each["FileSystemId"] in wanted["Values"]]
        shown = [dict(each) for each in own]
        for each in own:
            if each["Lifecycle"] == "DELETING":
                self.associations.remove(each)
            if each["Lifecycle"] in ("CREATING", "UPDATING"):
                state, message = self.association_ends.pop(0) if self.association_ends else ("AVAILABLE", "")
                each |= {"Lifecycle": state, **({"FailureDetails": {"Message": message}} if message else {})}
        return {"Associations": shown}

    def do_create_data_repository_association(self, **request: Any) -> Mapping[str, Any]:
        assert request["FileSystemId"] in self.file_systems or not self.file_systems
        assert request["DataRepositoryPath"].removeprefix("s3://").partition("/")[0] in self.buckets
        number = sum(call == "create_data_repository_association" for call in self.calls)
        self.associations.append({
            **request, "AssociationId": f"dra-0123456789abcdef{number}", "Lifecycle": "CREATING",
        })  # fmt: skip
        return {}

    def _association(self, id: str) -> Json:
        return next(each for each in self.associations if each["AssociationId"] == id)

    def do_update_data_repository_association(self, AssociationId: str, S3: Json) -> Mapping[str, Any]:
        self._association(AssociationId).update(S3=S3, Lifecycle="UPDATING")
        return {}

    def do_delete_data_repository_association(
        self, AssociationId: str, DeleteDataInFileSystem: bool
    ) -> Mapping[str, Any]:
        assert not DeleteDataInFileSystem
        self._association(AssociationId)["Lifecycle"] = "DELETING"
        return {}

    # EC2, quotas, S3

    def do_describe_capacity_reservations(self, CapacityReservationIds: list[str]) -> Mapping[str, Any]:
        there = {each["CapacityReservationId"]: each for each in self.reservations}
        if not there.keys() >= set(CapacityReservationIds):
            code = "InvalidCapacityReservationId.NotFound"
            raise explain(CloudRefusal.NOT_THERE, "describe-capacity-reservations", code=code)
        return {"CapacityReservations": [there[id] for id in CapacityReservationIds]}

    def do_describe_placement_groups(self, GroupNames: list[str]) -> Mapping[str, Any]:
        if GroupNames[0] not in self.groups:
            raise explain(CloudRefusal.NOT_THERE, "describe-placement-groups", code="InvalidPlacementGroup.Unknown")
        strategy = self.groups[GroupNames[0]]
        return {"PlacementGroups": [{"GroupName": GroupNames[0], "Strategy": strategy, "State": "available"}]}

    def do_describe_subnets(self, SubnetIds: list[str]) -> Mapping[str, Any]:
        return {"Subnets": [{"SubnetId": each, "AvailabilityZone": self.zone} for each in SubnetIds]}

    def do_get_service_quota(self, ServiceCode: str, QuotaCode: str) -> Mapping[str, Any]:
        return {"Quota": {"Value": self.quota}}

    def do_describe_key_pairs(self, KeyNames: list[str]) -> Mapping[str, Any]:
        if KeyNames[0] not in self.keys:
            raise explain(CloudRefusal.NOT_THERE, "describe-key-pairs")
        return {"KeyPairs": [{"KeyName": name, "KeyType": self.keys[name]} for name in KeyNames]}

    def do_create_key_pair(self, KeyName: str, KeyType: str, **_: Any) -> Mapping[str, Any]:
        self.keys[KeyName] = KeyType
        return {"KeyMaterial": "-----BEGIN PRIVATE KEY-----\n"}

    def do_head_bucket(self, Bucket: str, ExpectedBucketOwner: str = "") -> Mapping[str, Any]:
        if Bucket not in self.buckets:
            raise explain(CloudRefusal.NOT_THERE, "head-bucket", code="404")
        if ExpectedBucketOwner not in ("", self.bucket_owner):
            raise explain(CloudRefusal.DENIED, "head-bucket", code="403")
        return {}

    def do_create_bucket(self, Bucket: str, **_: Any) -> Mapping[str, Any]:
        assert Bucket not in self.buckets
        self.buckets.add(Bucket)
        return {}

    def do_put_public_access_block(self, Bucket: str, **request: Any) -> Mapping[str, Any]:
        assert Bucket in self.buckets and all(request["PublicAccessBlockConfiguration"].values())
        return {}

    def do_head_object(self, Bucket: str, Key: str) -> Mapping[str, Any]:
        if f"s3://{Bucket}/{Key}" not in self.objects:
            raise explain(CloudRefusal.NOT_THERE, "head-object", code="404")
        return {}

    def do_describe_secret(self, SecretId: str) -> Mapping[str, Any]:
        if SecretId not in self.secrets:
            raise explain(CloudRefusal.NOT_THERE, "describe-secret", code="ResourceNotFoundException")
        return {"ARN": SecretId, **self.secrets[SecretId]}

    def do_put_object(self, Bucket: str, Key: str, Body: bytes, ExpectedBucketOwner: str) -> Mapping[str, Any]:
        if ExpectedBucketOwner != self.bucket_owner:
            raise explain(CloudRefusal.DENIED, "put-object", code="AccessDenied")
        self.objects[f"s3://{Bucket}/{Key}"] = Body
        return {}


def without_policies(template: Json) -> Json:
    """Return a template without the policies. CloudFormation does not count their changes as changes."""
    resources = {
        name: {key: value for key, value in each.items() if key not in POLICIES}
        for name, each in template["Resources"].items()
    }
    return {**template, "Resources": resources}
