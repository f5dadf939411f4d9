"""Dry-run configs with the real `pcluster` against a moto server, and print what it said about each as JSON.

Runs with the Python of an environment that holds moto and boto3. stdin is a JSON list of cases: a name, a rendered
config, a template of a network in the config's region, and the reservation in it. The network, the file systems, the
buckets with the scripts, the key pairs and the secrets are created in moto, and the config gets their ids. Nothing else
in the config is changed.

    moto_dry_runs.py FOLDER PCLUSTER < CASES
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moto_shim

FOLDER, PCLUSTER = (Path(word) for word in sys.argv[1:3])
server = moto_shim.start()

import boto3

Json = dict[str, Any]


def leaves(tree: Any) -> Iterator[str]:
    """Yield all strings of a tree."""
    if isinstance(tree, dict):
        for each in tree.values():
            yield from leaves(each)
    elif isinstance(tree, list):
        for each in tree:
            yield from leaves(each)
    elif isinstance(tree, str):
        yield tree


def create_network(region: str, template: Json) -> dict[str, str]:
    """Create our own template, and return its outputs."""
    stacks = boto3.client("cloudformation", region)
    stacks.create_stack(StackName="network", TemplateBody=json.dumps(template), Capabilities=["CAPABILITY_IAM"])
    (stack,) = stacks.describe_stacks(StackName="network")["Stacks"]
    ec2 = boto3.client("ec2", region)
    for vpc in ec2.describe_vpcs()["Vpcs"]:  # moto's CloudFormation ignores these properties
        for name in ("EnableDnsHostnames", "EnableDnsSupport"):
            ec2.modify_vpc_attribute(VpcId=vpc["VpcId"], **{name: {"Value": True}})
    return {each["OutputKey"]: each["OutputValue"] for each in stack["Outputs"]}


def create_file_systems(config: Json, region: str, network: dict[str, str]) -> None:
    """Let moto describe the FSx file systems and volumes of a config, in our private subnet and security group."""
    card = boto3.client("ec2", region).create_network_interface(
        SubnetId=network["PrimaryPrivateSubnet"], Groups=[network["SecurityGroup"]]
    )
    common = {
        "VpcId": network["VpcId"], "SubnetIds": [network["PrimaryPrivateSubnet"]],
        "NetworkInterfaceIds": [card["NetworkInterface"]["NetworkInterfaceId"]],
    }  # fmt: skip
    moto_shim.file_systems.clear()
    moto_shim.volumes.clear()
    for storage in config.get("SharedStorage", ()):
        id, kind = storage.get("FsxLustreSettings", {}).get("FileSystemId"), "LUSTRE"
        if volume := storage.get("FsxOpenZfsSettings", {}).get("VolumeId"):
            id, kind = volume.replace("fsvol-", "fs-"), "OPENZFS"
            moto_shim.volumes.append({
                "VolumeId": volume, "FileSystemId": id, "VolumeType": kind, "Lifecycle": "AVAILABLE",
                "OpenZFSConfiguration": {"VolumePath": "/fsx"},
            })  # fmt: skip
        if id:
            moto_shim.file_systems.append({
                **common, "FileSystemId": id, "FileSystemType": kind, "Lifecycle": "AVAILABLE",
                "DNSName": f"{id}.fsx.{region}.amazonaws.com",
                **({"LustreConfiguration": {"MountName": "abcd"}} if kind == "LUSTRE" else {}),
            })  # fmt: skip


def create_named(config: Json, region: str) -> dict[str, str]:
    """Create the buckets, scripts, key pair and secrets of a config. Return the real ARNs of the secrets by theirs."""
    s3, found = boto3.client("s3", region), {}
    place = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    for leaf in sorted(set(leaves(config))):
        if leaf.startswith("s3://"):
            bucket, _, key = leaf.removeprefix("s3://").partition("/")
            if bucket not in [each["Name"] for each in s3.list_buckets()["Buckets"]]:
                s3.create_bucket(Bucket=bucket, **place)
            s3.put_object(Bucket=bucket, Key=key, Body=b"#!/bin/sh\n")
        if ":secretsmanager:" in leaf:
            made = boto3.client("secretsmanager", region).create_secret(
                Name=leaf.rpartition(":")[2], SecretString="password"
            )
            found[leaf] = made["ARN"]
    if key := config["HeadNode"]["Ssh"].get("KeyName"):
        boto3.client("ec2", region).create_key_pair(KeyName=key, KeyType="ed25519")
    return found


def dry_run(case: Json) -> Json:
    config, region = case["config"], case["config"]["Region"]
    network = create_network(region, case["template"])
    moto_shim.reservation |= case["reservation"]
    queues = config["Scheduling"]["SlurmQueues"]
    head = config["HeadNode"]["Networking"]
    ids = {each: network["PrimaryPrivateSubnet"] for queue in queues for each in queue["Networking"]["SubnetIds"]}
    ids |= {head["SubnetId"]: network["PublicSubnet"]}
    ids |= dict.fromkeys(head["AdditionalSecurityGroups"], network["SecurityGroup"])
    for policy in head_policies(config):
        if ":iam::aws:" not in policy:
            ids[policy] = network["NodePolicyArn"]
    create_file_systems(config, region, network)
    ids |= create_named(config, region)
    text = json.dumps(config)  # JSON is YAML
    for old, new in ids.items():
        text = text.replace(old, new)
    if head["SubnetId"] in queues[0]["Networking"]["SubnetIds"]:  # the placeholder of a new network is one for both
        tree = json.loads(text)
        for queue in tree["Scheduling"]["SlurmQueues"]:
            queue["Networking"]["SubnetIds"] = [network["PrimaryPrivateSubnet"]]
        text = json.dumps(tree)
    file = FOLDER / f"{case['name']}.yaml"
    file.write_text(text)
    done = subprocess.run(
        [PCLUSTER, "create-cluster", "--cluster-name", case["name"], "--region", region, "--dryrun", "true",
         "--cluster-configuration", str(file)], capture_output=True, text=True, env=os.environ, timeout=500,
    )  # fmt: skip
    return {"stdout": done.stdout, "stderr": done.stderr[-3000:]}


def head_policies(config: Json) -> list[str]:
    return [each["Policy"] for each in config["HeadNode"]["Iam"]["AdditionalIamPolicies"]]


print(json.dumps({case["name"]: dry_run(case) for case in json.load(sys.stdin)}))
server.stop()
