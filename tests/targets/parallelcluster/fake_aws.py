"""An account of AWS in memory, for tests of targets: stacks, keys, objects, file systems, reservations, quotas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dalsegno.targets.cloud.credentials import CloudRefusal, explain

IDS = {
    "AWS::EC2::VPC": "vpc-0123456789abcdef0",
    "AWS::EC2::SecurityGroup": "sg-0123456789abcdef0",
    "AWS::FSx::FileSystem": "fs-0123456789abcdef0",
    "AWS::IAM::ManagedPolicy": "arn:aws:iam::123456789012:policy/nodes",
}


@dataclass
class FakeAccount:
    """The state of the account. `refusals` are raised once each, in order, by the operation they name."""

    stacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    repositories: dict[str, str] = field(default_factory=dict)
    reservations: list[dict[str, Any]] = field(default_factory=list)
    quota: float = 10_000.0
    zone: str = "us-east-1a"
    stack_fails: str = ""
    bucket_owner: str = "123456789012"
    refusals: list[tuple[str, CloudRefusal]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def call(self, service: str, operation: str, **parameters: Any) -> Mapping[str, Any]:
        self.calls.append(operation)
        if self.refusals and self.refusals[0][0] == operation:
            raise explain(self.refusals.pop(0)[1], f"AWS {service} {operation}", "as the test asked")
        found: Mapping[str, Any] = getattr(self, f"do_{operation}")(**parameters)
        return found

    def do_get_caller_identity(self) -> Mapping[str, Any]:
        return {"Account": "123456789012"}

    def do_create_stack(self, StackName: str, TemplateBody: str, **_: Any) -> Mapping[str, Any]:
        status = ["CREATE_IN_PROGRESS", "CREATE_FAILED" if self.stack_fails else "CREATE_COMPLETE"]
        self.stacks[StackName] = {"template": json.loads(TemplateBody), "todo": status, "verb": "CREATE"}
        return {}

    def do_update_stack(self, StackName: str, TemplateBody: str, **_: Any) -> Mapping[str, Any]:
        stack = self.stacks[StackName]
        if stack["template"] == json.loads(TemplateBody):
            raise explain(CloudRefusal.INVALID, "update-stack", "No updates are to be performed.", "ValidationError")
        stack |= {"template": json.loads(TemplateBody), "todo": ["UPDATE_IN_PROGRESS", "UPDATE_COMPLETE"]}
        return {}

    def do_get_template(self, StackName: str) -> Mapping[str, Any]:
        return {"TemplateBody": self.stacks[StackName]["template"]}

    def do_delete_stack(self, StackName: str) -> Mapping[str, Any]:
        self.stacks[StackName] |= {"todo": ["DELETE_IN_PROGRESS", "DELETE_COMPLETE"], "verb": "DELETE"}
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
            {"OutputKey": key, "OutputValue": self._value(each["Value"], stack["template"])}
            for key, each in stack["template"].get("Outputs", {}).items()
        ]
        return {"Stacks": [{"StackName": StackName, "StackStatus": stack["status"], "Outputs": outputs}]}

    def do_describe_stack_events(self, StackName: str) -> Mapping[str, Any]:
        verb = self.stacks[StackName]["verb"]
        found = [{"EventId": "1", "LogicalResourceId": "Vpc", "ResourceType": "AWS::EC2::VPC",
                  "ResourceStatus": f"{verb}_IN_PROGRESS"}]  # fmt: skip
        if self.stack_fails:
            found.append({**found[0], "EventId": "2", "ResourceStatus": f"{verb}_FAILED",
                          "ResourceStatusReason": self.stack_fails})  # fmt: skip
        return {"StackEvents": found[::-1]}

    @staticmethod
    def _value(value: Any, template: Mapping[str, Any]) -> str:
        if isinstance(value, str):
            return value
        if "Fn::GetAtt" in value:
            return "fsvol-0123456789abcdef0"
        name = value["Ref"]
        if name.endswith("Subnet"):
            return f"subnet-0{'a' if name == 'PublicSubnet' else 'b'}23456789abcdef0"
        resource = template["Resources"][name]
        if resource["Type"] == "AWS::S3::Bucket":
            return str(resource["Properties"]["BucketName"])
        return IDS[resource["Type"]]

    def do_describe_capacity_reservations(self, CapacityReservationIds: list[str]) -> Mapping[str, Any]:
        return {"CapacityReservations": self.reservations}

    def do_describe_subnets(self, SubnetIds: list[str]) -> Mapping[str, Any]:
        return {"Subnets": [{"SubnetId": each, "AvailabilityZone": self.zone} for each in SubnetIds]}

    def do_get_service_quota(self, ServiceCode: str, QuotaCode: str) -> Mapping[str, Any]:
        return {"Quota": {"Value": self.quota}}

    def do_describe_key_pairs(self, KeyNames: list[str]) -> Mapping[str, Any]:
        if KeyNames[0] not in self.keys:
            raise explain(CloudRefusal.NOT_THERE, "describe-key-pairs")
        return {}

    def do_create_key_pair(self, KeyName: str, **_: Any) -> Mapping[str, Any]:
        self.keys.add(KeyName)
        return {"KeyMaterial": "-----BEGIN PRIVATE KEY-----\n"}

    def do_put_object(self, Bucket: str, Key: str, Body: bytes, ExpectedBucketOwner: str) -> Mapping[str, Any]:
        if ExpectedBucketOwner != self.bucket_owner:
            raise explain(CloudRefusal.DENIED, "put-object", code="AccessDenied")
        self.objects[f"s3://{Bucket}/{Key}"] = Body
        return {}

    def do_describe_data_repository_associations(self, **_: Any) -> Mapping[str, Any]:
        found = [{"DataRepositoryPath": path, "Lifecycle": state} for path, state in self.repositories.items()]
        for path in self.repositories:
            self.repositories[path] = "AVAILABLE"
        return {"Associations": found}

    def do_create_data_repository_association(self, DataRepositoryPath: str, **_: Any) -> Mapping[str, Any]:
        self.repositories[DataRepositoryPath] = "CREATING"
        return {}
