"""The prerequisites of a cluster on ParallelCluster: network, file systems, bucket and policy. Pure.

The cluster file can name existing resources, or existing CloudFormation stacks whose outputs contain the ids of
resources. Our own CloudFormation stack creates the other prerequisites.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dalsegno.errors import TargetError
from dalsegno.spec.aws_facts import PclusterSettings
from dalsegno.spec.facts import Cluster, Storage
from dalsegno.targets.cloud.consequences import CloudResource
from dalsegno.targets.parallelcluster.stack_changes import BUCKET, FILE_SYSTEM, keep

VPC_CIDR, PUBLIC_CIDR, PRIVATE_CIDR = "10.0.0.0/16", "10.0.0.0/20", "10.0.128.0/17"
_MAKES = ("lustre", "openzfs")  # storage types that our stack creates; ParallelCluster creates efs and ebs itself
DEFAULT_LUSTRE_THROUGHPUT, OPENZFS_THROUGHPUT = 250, 256  # in MB/s per TiB, and in MB/s of the whole file system
# The names of outputs in our own stack and in stacks that others published.
_ALIASES = {
    "head_subnet": ("PublicSubnet", "PublicSubnetId", "HeadNodeSubnetId", "PublicSubnet1"),
    "compute_subnet": ("PrimaryPrivateSubnet", "PrivateSubnet", "PrivateSubnetId", "PrivateSubnet1"),
    "security_group": ("SecurityGroup", "SecurityGroupId", "EfaSecurityGroup"),
    "lustre": ("FSxLustreFilesystemId", "FSxLustreFileSystemId"),
    "openzfs": ("FSxORootVolumeId", "FSxOpenZFSRootVolumeId", "FSxOpenZfsRootVolumeId"),
    "bucket": ("S3BucketName", "BucketName", "DataBucketName"),
    "policy": ("NodePolicyArn",),
}


@dataclass(frozen=True)
class Prerequisites:
    """The ids of the prerequisites that cluster.yaml refers to. An id is empty, and missing in `storage`, as long as it
    is not known or the resource does not exist."""

    head_subnet: str = ""
    compute_subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    storage: Mapping[str, str] = field(default_factory=dict)  # storage name -> id
    bucket: str = ""
    policy: str = ""  # ARN of the policy that lets nodes read the bucket


def settings_of(cluster: Cluster) -> PclusterSettings:
    """Return the section `parallelcluster` of a cluster."""
    if cluster.parallelcluster is None:
        raise TargetError("the cluster has no settings for ParallelCluster", hint="add a `parallelcluster:` block")
    return cluster.parallelcluster


def given(cluster: Cluster) -> Prerequisites:
    """Return the ids that are in the cluster file."""
    own = settings_of(cluster)
    return Prerequisites(
        own.head_subnet,
        own.subnets or ((own.head_subnet,) if own.head_subnet else ()),
        own.security_groups,
        {each.name: each.source for each in cluster.storage if each.source},
        own.bucket,
    )


def merge_outputs(known: Prerequisites, cluster: Cluster, outputs: Mapping[str, str]) -> Prerequisites:
    """Return the known ids and those in the outputs of a stack. Known ids are not replaced.

    Subnets and security groups of the stack are left out if the known subnet of the head is not in its outputs.
    """

    def first(kind: str) -> str:
        return next((outputs[name] for name in _ALIASES[kind] if outputs.get(name)), "")

    storage = dict(known.storage)
    for each in cluster.storage:
        found = outputs.get(output_name(each)) or (first(each.type) if each.type in _MAKES else "")
        if found and each.name not in storage and found not in storage.values():
            storage[each.name] = found
    head, compute, group = first("head_subnet"), first("compute_subnet"), first("security_group")
    fits = not known.head_subnet or known.head_subnet == head
    return replace(
        known,
        head_subnet=known.head_subnet or head,
        compute_subnets=known.compute_subnets or ((compute or head,) if (compute or head) and fits else ()),
        security_groups=(
            *known.security_groups,
            *([group] if group and fits and group not in known.security_groups else []),
        ),
        storage=storage,
        bucket=known.bucket or first("bucket"),
        policy=known.policy or first("policy"),
    )


def placeholders(known: Prerequisites, cluster: Cluster) -> Prerequisites:
    """Return the known ids, with a placeholder of the right form for each resource that does not exist yet.

    With the placeholders, a config can be shown and checked before the resources exist.
    """
    zeros = "0" * 17
    subnet = known.head_subnet or f"subnet-{zeros}"
    storage = {
        each.name: f"fs-{zeros}" if each.type == "lustre" else f"fsvol-{zeros}"
        for each in cluster.storage
        if each.type in _MAKES
    }
    return Prerequisites(
        subnet,
        known.compute_subnets or (subnet,),
        known.security_groups or (f"sg-{zeros}",),
        {**storage, **known.storage},
        known.bucket or "dalsegno-new-bucket",
        known.policy or "arn:aws:iam::000000000000:policy/dalsegno-new-policy",
    )


def stack_name(cluster: str) -> str:
    return f"dalsegno-{cluster}"


def bucket_name(cluster: str, account: str, region: str) -> str:
    """Return the name of the bucket that the stack creates. The name must be unique in all of AWS."""
    return f"dalsegno-{cluster}-{account}-{region}"[:63].rstrip("-")


def output_name(storage: Storage) -> str:
    return "Storage" + _logical(storage.name)


def _logical(name: str) -> str:
    return "".join(word.capitalize() for word in name.replace("_", "-").split("-"))


def new_resources(
    cluster: Cluster, known: Prerequisites, repositories: Iterable[str], buckets: Iterable[str] = ()
) -> tuple[CloudResource, ...]:
    """Return the resources that `up` creates because they are not among the known ones.

    `repositories` are the S3 addresses whose data repository association is created or repaired. `buckets` are the
    buckets of data repositories that do not exist yet.
    """
    found: list[CloudResource] = []
    if not known.head_subnet:
        found.append(CloudResource("network with a public and a private subnet", (cluster.name,)))
    for each in cluster.storage:
        if each.type in _MAKES and each.name not in known.storage:
            noun = "FSx for Lustre file system" if each.type == "lustre" else "FSx for OpenZFS volume"
            found.append(CloudResource(noun, (each.name,)))
    if not known.bucket:
        found.append(CloudResource("S3 bucket", (f"dalsegno-{cluster.name}-…",)))
    found += [CloudResource("S3 bucket", (name,)) for name in buckets]
    found += [CloudResource("data repository association", (s3,)) for s3 in repositories]
    return tuple(found)


def render_template(cluster: Cluster, known: Prerequisites, bucket: str, zone: str = "") -> dict[str, Any]:
    """Return the template of our own CloudFormation stack: everything that `known` lacks.

    `known` has no ids from this stack, because the stack's own resources must stay in its template. `bucket` is the
    bucket with the bootstrap scripts, new or existing. The template always has the policy that lets nodes read them.
    """
    own = settings_of(cluster)
    resources: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    if not known.head_subnet:
        _add_network(cluster, zone or own.availability_zone, resources, outputs)
    subnet: Any = {"Ref": "PrivateSubnet"} if not known.head_subnet else known.compute_subnets[0]
    groups: list[Any] = [{"Ref": "EfaSecurityGroup"}] if not known.head_subnet else list(known.security_groups)
    for storage in cluster.storage:
        if storage.type in _MAKES and storage.name not in known.storage:
            _add_file_system(cluster, storage, subnet, groups, resources, outputs)
    if not known.bucket:
        resources["Bucket"] = _bucket(cluster, bucket)
    outputs["S3BucketName"] = {"Value": {"Ref": "Bucket"} if not known.bucket else bucket}
    resources["NodePolicy"] = _policy(cluster, bucket)
    outputs["NodePolicyArn"] = {"Value": {"Ref": "NodePolicy"}}
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"Written by Dal Segno: what cluster {cluster.name} needs before ParallelCluster creates it",
        "Resources": resources,
        "Outputs": outputs,
    }


def _tags(cluster: Cluster, part: str = "") -> list[dict[str, str]]:
    name = f"{cluster.name}-{part}" if part else cluster.name
    own = {**settings_of(cluster).tags, "Name": name, "dalsegno:cluster": cluster.name}
    return [{"Key": key, "Value": value} for key, value in own.items()]


_VPC = {"Ref": "Vpc"}
_EFA_GROUP = {"Ref": "EfaSecurityGroup"}
_EVERYWHERE = "0.0.0.0/0"


def _add_network(cluster: Cluster, zone: str, resources: dict[str, Any], outputs: dict[str, Any]) -> None:
    """Add a network with a public subnet for head and login nodes, a private one for compute nodes, and a security
    group for EFA."""
    resources |= {**_subnets(cluster, zone), **_routes(cluster), **_efa_group(cluster)}
    outputs |= {
        "VpcId": {"Value": _VPC},
        "PublicSubnet": {"Value": {"Ref": "PublicSubnet"}},
        "PrimaryPrivateSubnet": {"Value": {"Ref": "PrivateSubnet"}},
        "SecurityGroup": {"Value": _EFA_GROUP},
    }


def _subnets(cluster: Cluster, zone: str) -> dict[str, Any]:
    """Return the network, its two subnets, and the gateways through which they reach the internet."""
    place: Any = zone or {"Fn::Select": [0, {"Fn::GetAZs": ""}]}

    def subnet(cidr: str, part: str, public: bool) -> dict[str, Any]:
        properties: dict[str, Any] = {"VpcId": _VPC, "CidrBlock": cidr, "MapPublicIpOnLaunch": public}
        properties["AvailabilityZoneId" if "-az" in zone else "AvailabilityZone"] = place
        return {"Type": "AWS::EC2::Subnet", "Properties": {**properties, "Tags": _tags(cluster, part)}}

    return {
        "Vpc": {
            "Type": "AWS::EC2::VPC",
            "Properties": {
                "CidrBlock": VPC_CIDR,
                "EnableDnsSupport": True,
                "EnableDnsHostnames": True,
                "Tags": _tags(cluster),
            },
        },
        "InternetGateway": {"Type": "AWS::EC2::InternetGateway", "Properties": {"Tags": _tags(cluster)}},
        "GatewayAttachment": {
            "Type": "AWS::EC2::VPCGatewayAttachment",
            "Properties": {"VpcId": _VPC, "InternetGatewayId": {"Ref": "InternetGateway"}},
        },
        "PublicSubnet": subnet(PUBLIC_CIDR, "public", True),
        "PrivateSubnet": subnet(PRIVATE_CIDR, "private", False),
        "NatAddress": {
            "Type": "AWS::EC2::EIP",
            "DependsOn": "GatewayAttachment",
            "Properties": {"Domain": "vpc", "Tags": _tags(cluster, "nat")},
        },
        "NatGateway": {
            "Type": "AWS::EC2::NatGateway",
            "Properties": {
                "AllocationId": {"Fn::GetAtt": ["NatAddress", "AllocationId"]},
                "SubnetId": {"Ref": "PublicSubnet"},
                "Tags": _tags(cluster),
            },
        },
    }


def _routes(cluster: Cluster) -> dict[str, Any]:
    """Return the routes of both subnets, and the endpoint for S3."""

    def routes(part: str) -> dict[str, Any]:
        return {"Type": "AWS::EC2::RouteTable", "Properties": {"VpcId": _VPC, "Tags": _tags(cluster, part)}}

    def joins(subnet: str, table: str) -> dict[str, Any]:
        properties = {"SubnetId": {"Ref": subnet}, "RouteTableId": {"Ref": table}}
        return {"Type": "AWS::EC2::SubnetRouteTableAssociation", "Properties": properties}

    return {
        "PublicRoutes": routes("public"),
        "PrivateRoutes": routes("private"),
        "PublicRoute": {
            "Type": "AWS::EC2::Route",
            "DependsOn": "GatewayAttachment",
            "Properties": {
                "RouteTableId": {"Ref": "PublicRoutes"},
                "DestinationCidrBlock": _EVERYWHERE,
                "GatewayId": {"Ref": "InternetGateway"},
            },
        },
        "PrivateRoute": {
            "Type": "AWS::EC2::Route",
            "Properties": {
                "RouteTableId": {"Ref": "PrivateRoutes"},
                "DestinationCidrBlock": _EVERYWHERE,
                "NatGatewayId": {"Ref": "NatGateway"},
            },
        },
        "PublicRoutesOfSubnet": joins("PublicSubnet", "PublicRoutes"),
        "PrivateRoutesOfSubnet": joins("PrivateSubnet", "PrivateRoutes"),
        "S3Endpoint": {  # a gateway endpoint is free; the NAT gateway charges for each GB
            "Type": "AWS::EC2::VPCEndpoint",
            "Properties": {
                "VpcId": _VPC,
                "VpcEndpointType": "Gateway",
                "ServiceName": {"Fn::Sub": "com.amazonaws.${AWS::Region}.s3"},
                "RouteTableIds": [{"Ref": "PublicRoutes"}, {"Ref": "PrivateRoutes"}],
            },
        },
    }


def _efa_group(cluster: Cluster) -> dict[str, Any]:
    """Return the security group of all machines. EFA needs all traffic within the group, in both directions."""
    return {
        "EfaSecurityGroup": {
            "Type": "AWS::EC2::SecurityGroup",
            "Properties": {
                "GroupDescription": f"All traffic between the machines of {cluster.name}",
                "VpcId": _VPC,
                "Tags": _tags(cluster, "efa"),
            },
        },
        # The rules are separate resources, because rules inside the group would refer to the group itself.
        "EfaInside": {
            "Type": "AWS::EC2::SecurityGroupIngress",
            "Properties": {"GroupId": _EFA_GROUP, "SourceSecurityGroupId": _EFA_GROUP, "IpProtocol": "-1"},
        },
        "EfaOutside": {
            "Type": "AWS::EC2::SecurityGroupEgress",
            "Properties": {"GroupId": _EFA_GROUP, "DestinationSecurityGroupId": _EFA_GROUP, "IpProtocol": "-1"},
        },
        "AllOutside": {
            "Type": "AWS::EC2::SecurityGroupEgress",
            "Properties": {"GroupId": _EFA_GROUP, "CidrIp": _EVERYWHERE, "IpProtocol": "-1"},
        },
    }


def _add_file_system(
    cluster: Cluster,
    storage: Storage,
    subnet: Any,
    groups: Iterable[Any],
    resources: dict[str, Any],
    outputs: dict[str, Any],
) -> None:
    name, gib = _logical(storage.name), (storage.size_mib or 0) // 1024
    common = {
        "StorageCapacity": gib,
        "StorageType": "SSD",
        "SubnetIds": [subnet],
        "SecurityGroupIds": list(groups),
        "Tags": _tags(cluster, storage.name),
    }
    if storage.type == "lustre":
        settings: dict[str, Any] = {
            "FileSystemType": "LUSTRE",
            "FileSystemTypeVersion": "2.15",
            "LustreConfiguration": {
                "DeploymentType": "PERSISTENT_2",
                "PerUnitStorageThroughput": storage.throughput_mb_per_s_per_tib or DEFAULT_LUSTRE_THROUGHPUT,
                "DataCompressionType": "LZ4",
            },
        }
        value: Any = {"Ref": name}
    else:
        settings = {
            "FileSystemType": "OPENZFS",
            "OpenZFSConfiguration": {
                "DeploymentType": "SINGLE_AZ_1",
                "ThroughputCapacity": storage.throughput_mb_per_s_per_tib or OPENZFS_THROUGHPUT,
                "RootVolumeConfiguration": {
                    "DataCompressionType": "ZSTD",
                    # Every client may mount the file system, because the security group decides who can reach it.
                    "NfsExports": [{"ClientConfigurations": [{"Clients": "*", "Options": _NFS_OPTIONS}]}],
                },
            },
        }
        value = {"Fn::GetAtt": [name, "RootVolumeId"]}
    resources[name] = keep({"Type": FILE_SYSTEM, "Properties": {**settings, **common}})
    outputs[output_name(storage)] = {"Value": value}


_NFS_OPTIONS = ["rw", "crossmnt", "sync", "no_root_squash"]  # root on the nodes creates the home folders


def _bucket(cluster: Cluster, name: str) -> dict[str, Any]:
    """Return the bucket. It outlives the stack, because it may contain users' data."""
    rule = {"ServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
    closed = ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets")
    return {
        "Type": BUCKET,
        "DeletionPolicy": "Retain",
        "UpdateReplacePolicy": "Retain",
        "Properties": {
            "BucketName": name,
            "BucketEncryption": {"ServerSideEncryptionConfiguration": [rule]},
            "PublicAccessBlockConfiguration": dict.fromkeys(closed, True),
            "Tags": _tags(cluster),
        },
    }


def _policy(cluster: Cluster, bucket: str) -> dict[str, Any]:
    """Return the policy of the nodes: they may read the bootstrap scripts, and nothing else in the bucket."""
    objects = {"Fn::Sub": f"arn:${{AWS::Partition}}:s3:::{bucket}/{scripts_prefix(cluster.name)}*"}
    return {
        "Type": "AWS::IAM::ManagedPolicy",
        "Properties": {
            "Description": f"Machines of cluster {cluster.name} read their bootstrap scripts",
            "PolicyDocument": {
                "Version": "2012-10-17",
                "Statement": [{"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": [objects]}],
            },
        },
    }


def scripts_prefix(cluster: str) -> str:
    """Return the folder of the bootstrap scripts in the bucket."""
    return f"dalsegno/{cluster}/"
