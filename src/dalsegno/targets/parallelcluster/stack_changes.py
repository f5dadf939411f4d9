"""Our CloudFormation stack as it is, and what a new template does to its resources. Pure.

CloudFormation deletes a resource that a new template lacks, and replaces a resource if certain properties change. The
files would then be lost. So file systems and buckets have policies that make CloudFormation keep them on AWS.
CloudFormation obeys the policies of the template that is in force, not those of the new one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dalsegno.targets.cloud.consequences import ChangeEffect, SettingChange, compare_settings, show_setting
from dalsegno.targets.cloud.progress import OperationState

Template = Mapping[str, Any]
FILE_SYSTEM, BUCKET = "AWS::FSx::FileSystem", "AWS::S3::Bucket"
HOLDS_DATA = (FILE_SYSTEM, BUCKET)
# The network resources that a file system needs
NETWORK = ("Vpc", "PrivateSubnet", "EfaSecurityGroup", "EfaInside", "EfaOutside", "AllOutside")
_KEEP = {
    # CloudFormation ignores an update that changes nothing but policies. So the metadata changes with them.
    "Metadata": {"DalSegno": {"Keep": True}},
    "DeletionPolicy": "Retain",
    "UpdateReplacePolicy": "Retain",
}


@dataclass(frozen=True)
class OwnStack:
    """The stack of a cluster's prerequisites, as CloudFormation reports it."""

    state: OperationState = OperationState.GONE
    complete: bool = False  # whether its creation succeeded and its deletion has not begun
    creating: bool = False
    unused: bool = False  # whether its creation failed, so that nothing uses its resources yet
    outputs: Mapping[str, str] = field(default_factory=dict)
    template: Template = field(default_factory=dict)
    ids: Mapping[str, str] = field(default_factory=dict)  # name in the template -> id of the resource

    @property
    def exists(self) -> bool:
        return self.state is not OperationState.GONE

    @property
    def file_systems(self) -> dict[str, str]:
        """The id of each FSx file system, by its name in the template."""
        return {name: self.ids[name] for name in of_type(self.template, FILE_SYSTEM) if self.ids.get(name)}

    @property
    def has_bucket(self) -> bool:
        """Whether the stack has the bucket, or is creating it.

        It is false after the stack was deleted or its creation failed, although the bucket may still exist on AWS.
        """
        return (self.complete or self.creating) and bool(of_type(self.template, BUCKET))

    @property
    def has_network(self) -> bool:
        return self.complete and "PrivateSubnet" in _resources(self.template)

    @property
    def zone(self) -> str:
        """The availability zone of the network in this stack; "" if there is none, or if AWS chose it."""
        own = _resources(self.template).get("PrivateSubnet", {}).get("Properties", {})
        found = own.get("AvailabilityZone") or own.get("AvailabilityZoneId")
        return found if self.has_network and isinstance(found, str) else ""


def _resources(template: Template) -> Mapping[str, Any]:
    found: Mapping[str, Any] = template.get("Resources", {})
    return found


def of_type(template: Template, kind: str) -> list[str]:
    """Return the names of all resources of a type."""
    return [name for name, each in _resources(template).items() if each.get("Type") == kind]


def keep(resource: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resource with policies that make CloudFormation keep it on AWS when it leaves the stack."""
    return {**resource, **_KEEP}


def keep_all(template: Template, names: Collection[str]) -> dict[str, Any]:
    """Return the template with policies that make CloudFormation keep the resources in `names`."""
    resources = {name: keep(each) if name in names else each for name, each in _resources(template).items()}
    return {**template, "Resources": resources}


def keep_data(template: Template) -> dict[str, Any]:
    """Return the template with policies that make CloudFormation keep all file systems and buckets."""
    unprotected = [
        name
        for name, each in _resources(template).items()
        if each.get("Type") in HOLDS_DATA and each.get("DeletionPolicy") != "Retain"
    ]
    return keep_all(template, unprotected)


def drops_data(old: Template, new: Template) -> bool:
    """Return whether a file system or a bucket of the old template is not in the new one."""
    return any(each.get("Type") in HOLDS_DATA and name not in _resources(new) for name, each in _resources(old).items())


# The changes that CloudFormation makes without replacing the resource, each with its consequence. Changes of tags and
# deletion policies are allowed too. All other changes are refused.
_IN_PLACE: Mapping[tuple[str, str], str] = {
    (FILE_SYSTEM, "StorageCapacity"): "the file system grows while it is used; this takes hours",
    (FILE_SYSTEM, "OpenZFSConfiguration/ThroughputCapacity"): "reads and writes wait for some minutes",
    ("AWS::IAM::ManagedPolicy", "PolicyDocument"): "",
    (BUCKET, "BucketEncryption"): "",
    (BUCKET, "PublicAccessBlockConfiguration"): "",
}
_ATTRIBUTES = ("DeletionPolicy", "UpdateReplacePolicy", "Metadata")
_NEW_STORAGE = "create another storage in the cluster file, copy the files, then remove this one"


def stack_changes(stack: OwnStack, new: Template, sources: Collection[str], region: str) -> list[SettingChange]:
    """Return the differences between a stack and a new template, with the effect of each.

    `sources` are the file systems and volumes that the cluster file names as existing. New resources are not listed.
    Of the removed resources, only file systems and parts of the network are listed.
    """
    found: list[SettingChange] = []
    for name, old in _resources(stack.template).items():
        if name in _resources(new):
            found += _resource_changes(name, old, _resources(new)[name])
        elif old.get("Type") == FILE_SYSTEM:
            found.append(_released(stack, name, sources, region))
        elif old.get("Type", "").startswith("AWS::EC2::"):
            detail = "the cluster uses this part of its network"
            found.append(SettingChange(_path(name), "set", "", ChangeEffect.NEEDS_NEW_CLUSTER, detail))
    return found


def leaving(stack: OwnStack, new: Template) -> dict[str, str]:
    """Return the file systems of a stack that a new template lacks: their ids, each with the id that nodes mount."""
    return {
        id: stack.outputs.get(f"Storage{name}", id)
        for name, id in stack.file_systems.items()
        if name not in _resources(new)
    }


def _path(name: str, setting: str = "") -> str:
    return f"stack/{name}/{setting}" if setting else f"stack/{name}"


def _released(stack: OwnStack, name: str, sources: Collection[str], region: str) -> SettingChange:
    """Return the consequence of removing a file system from the stack."""
    id = stack.ids.get(name, "")
    if {id, stack.outputs.get(f"Storage{name}", "")} & set(sources):
        detail = "it stays mounted with its files; from now on, `dalsegno down` keeps it"
    else:
        command = f"aws fsx delete-file-system --file-system-id {id or 'ID'} --region {region}"
        detail = (
            "the file system stays with its files, but is not mounted any more. AWS bills it, in addition to the price "
            f"below, until you delete it with `{command}`. `dalsegno down` keeps it"
        )
    return SettingChange(_path(name), id or "set", "", ChangeEffect.IN_PLACE, detail)


def _resource_changes(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[SettingChange]:
    kind = str(old.get("Type", ""))
    if old.get("DeletionPolicy") != new.get("DeletionPolicy"):
        shown = (str(old.get("DeletionPolicy", "")), str(new.get("DeletionPolicy", "")))
        yield SettingChange(_path(name, "DeletionPolicy"), *shown, ChangeEffect.IN_PLACE)
    before, after = (
        {key: value for key, value in each.items() if key not in _ATTRIBUTES and key != "Properties"}
        | dict(each.get("Properties", {}))
        for each in (old, new)
    )
    for path, was, becomes in compare_settings(before, after):
        effect, detail = _effect(kind, path, was, becomes)
        yield SettingChange(_path(name, path), show_setting(was), show_setting(becomes), effect, detail)


def _effect(kind: str, path: str, old: object, new: object) -> tuple[ChangeEffect, str]:
    if kind == FILE_SYSTEM and path == "StorageCapacity" and not _grows(old, new):
        return ChangeEffect.NEEDS_NEW_CLUSTER, f"a file system cannot get smaller; {_NEW_STORAGE}"
    if path == "Tags":
        return ChangeEffect.IN_PLACE, ""
    for (known, setting), detail in _IN_PLACE.items():
        if kind == known and (path == setting or path.startswith(f"{setting}/")):
            return ChangeEffect.IN_PLACE, detail
    if kind in HOLDS_DATA:
        return ChangeEffect.NEEDS_NEW_CLUSTER, f"it would be replaced by an empty one; {_NEW_STORAGE}"
    return ChangeEffect.NEEDS_NEW_CLUSTER, "it would be replaced, and the cluster uses it"


def _grows(old: object, new: object) -> bool:
    return isinstance(old, int) and isinstance(new, int) and new > old
