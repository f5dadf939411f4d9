"""Requests to HyperPod and their check against AWS' full service model. No server is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("botocore")

from dalsegno.errors import TargetError
from dalsegno.targets.cloud.aws import FakeAws
from dalsegno.targets.cloud.service_model import check_request, find_problems, input_shape
from dalsegno.targets.hyperpod.answers import (
    ClusterDescription,
    GroupDescription,
    HyperPodStatus,
    InstanceStatus,
    SharedFileSystem,
    read_cluster,
    read_instances,
)
from dalsegno.targets.hyperpod.api import HyperPodApi
from dalsegno.targets.hyperpod.changes import find_changes, update_request
from dalsegno.targets.hyperpod.lifecycle import SCHEMA, check_parameters, provisioning_parameters
from dalsegno.targets.hyperpod.requests import batches, create_request
from tests.targets.hyperpod.conftest import CPU, GPU, cluster_of

LUSTRE = SharedFileSystem("fs-0123456789abcdef0.fsx.us-east-1.amazonaws.com", "/fsx", "abcdefgh")
OPENZFS = SharedFileSystem("fs-0123456789abcdef1.fsx.us-east-1.amazonaws.com", "/home")
ALL = (
    "  subnets: [subnet-0123456789abcdef0]\n  security_groups: [sg-0123456789abcdef0]\n  volume: 500G\n"
    "  node_recovery: None\n  tags: {team: research}\n"
    "  groups:\n    gpu:\n      training_plan: arn:aws:sagemaker:us-east-1:123456789012:training-plan/p5\n"
    "      threads_per_core: 2\n"
)


def problems(operation: str, request: dict[str, object]) -> list[str]:
    return list(find_problems(input_shape("sagemaker", operation), request))


def changed(path: str, value: object) -> list[str]:
    """Return the problems of a valid request in which one value of the second group is replaced."""
    request = create_request(cluster_of(CPU + GPU, ALL), [LUSTRE])
    place: object = request["InstanceGroups"][2]
    *parents, last = path.split(".")
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[last] = value
    return problems("CreateCluster", request)


@pytest.mark.parametrize("configuration", ["api", "provisioning"])
def test_request_with_every_setting_fits_the_service_model(configuration, golden):
    settings = f"{ALL}  configuration: {configuration}\n"
    request = create_request(cluster_of(CPU + GPU, settings), [LUSTRE, OPENZFS])
    assert problems("CreateCluster", request) == []
    golden(f"hyperpod/create-{configuration}.json", json.dumps(request, indent=1) + "\n")


def test_wrong_enum_is_refused_with_the_closest_value():
    assert changed("InstanceType", "ml.p5.48xlarg") == [
        "InstanceGroups[2].InstanceType cannot be `ml.p5.48xlarg`: did you mean `ml.p5.48xlarge`?"
    ]


def test_values_outside_their_limits_are_refused():
    assert changed("InstanceCount", 7000) == ["InstanceGroups[2].InstanceCount is 7000: at most 6758"]
    assert changed("ThreadsPerCore", 0) == ["InstanceGroups[2].ThreadsPerCore is 0: at least 1"]
    assert "at most 63 characters" in changed("InstanceGroupName", "x" * 64)[0]
    assert "at most 1 entries" in changed("SlurmConfig.PartitionNames", ["a", "b"])[0]


def test_value_that_does_not_match_its_pattern_is_refused():
    (found,) = changed("ExecutionRole", "arn:aws:iam::12:role/x-of-some-length")
    assert found.startswith("InstanceGroups[2].ExecutionRole is `arn:aws:iam::12:role/x-of-some-length`, which does")


def test_missing_unknown_and_mistyped_fields_are_refused_together():
    request = {"InstanceGroup": [], "NodeRecovery": True}
    assert problems("CreateCluster", request) == [
        "ClusterName is missing",
        "InstanceGroup is unknown (did you mean `InstanceGroups`?)",
        "NodeRecovery is True, not a string",
    ]


def test_letters_of_other_languages_are_allowed_in_tags():
    request = {"ClusterName": "demo", "Tags": [{"Key": "équipe", "Value": "研究 1"}]}
    assert problems("CreateCluster", request) == []
    request["Tags"][0]["Value"] = "a|b"
    assert "does not match" in problems("CreateCluster", request)[0]


def test_error_names_the_operation_and_an_old_sdk():
    with pytest.raises(TargetError, match="sagemaker would refuse the request DeleteCluster: ClusterName is missing"):
        check_request("sagemaker", "DeleteCluster", {})
    with pytest.raises(TargetError, match="does not know CreateCastle") as caught:
        check_request("sagemaker", "CreateCastle", {})
    assert "--upgrade" in caught.value.hint


# Changes


def found_cluster(**groups: tuple[str, int]) -> ClusterDescription:
    uri = "s3://sagemaker-demo-lifecycle/demo"
    known = [GroupDescription(name, kind, count, count, uri) for name, (kind, count) in groups.items()]
    return ClusterDescription("arn:aws:x/abc", "demo", HyperPodStatus.IN_SERVICE, groups=tuple(known))


RUNNING = {"controller": ("ml.m5.2xlarge", 1), "login": ("ml.m5.xlarge", 1), "cpu": ("ml.c5.4xlarge", 2)}


def test_cluster_that_is_as_its_file_needs_no_request():
    assert update_request(cluster_of(CPU), found_cluster(**RUNNING), []) is None
    assert find_changes(cluster_of(CPU), found_cluster(**RUNNING)) == ()


def test_smaller_partition_names_what_is_lost():
    (change,) = find_changes(cluster_of(CPU), found_cluster(**{**RUNNING, "cpu": ("ml.c5.4xlarge", 4)}))
    assert change.sentence() == (
        "instance group cpu: nodes: 4 → 2; deletes data: "
        "HyperPod chooses the nodes that leave; their jobs end, and their local files are lost"
    )


def test_partition_with_nodes_of_another_has_no_group_of_its_own():
    shared = CPU + "  - {name: all, nodes_from: [cpu]}\n"
    names = [each["InstanceGroupName"] for each in create_request(cluster_of(shared), [])["InstanceGroups"]]
    assert names == ["controller", "login", "cpu"]


def test_batches_have_at_most_25_nodes():
    assert [len(part) for part in batches([f"i-{number}" for number in range(60)])] == [25, 25, 10]


# provisioning_parameters.json


def test_provisioning_parameters_fit_their_schema():
    jsonschema = pytest.importorskip("jsonschema")
    from dalsegno.targets.hyperpod import lifecycle

    schema = json.loads((Path(lifecycle.__file__).parent / SCHEMA).read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    parameters = provisioning_parameters(cluster_of(CPU + GPU), [LUSTRE, OPENZFS])
    jsonschema.validate(parameters, schema)
    assert parameters["worker_groups"][1] == {"instance_group_name": "gpu", "partition_name": "gpu"}
    for wrong in ({"version": "2"}, {"worker_groups": []}, {"fsx_mountname": "x" * 9}, {"fsx_dns_nam": "x"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**parameters, **wrong}, schema)


def test_parameters_with_a_group_that_does_not_exist_are_refused():
    parameters = {**provisioning_parameters(cluster_of(), []), "controller_group": "head"}
    with pytest.raises(TargetError, match="names the instance group `head`, which the cluster does not have"):
        check_parameters(parameters, ["controller", "cpu"])


# Answers


def test_unknown_states_are_not_an_error():
    cluster = read_cluster({"ClusterArn": "arn:aws:sagemaker:us-east-1:1:cluster/abc", "ClusterStatus": "Dreaming"})
    assert (cluster.id, cluster.status, cluster.groups) == ("abc", HyperPodStatus.UNKNOWN, ())
    (node,) = read_instances(
        [{"InstanceId": "i-1", "InstanceStatus": {"Status": "Sleeping"}, "PrivateDnsHostname": "a.b"}]
    )
    assert (node.status, node.host) == (InstanceStatus.UNKNOWN, "a")


def test_scripts_are_written_only_to_a_bucket_of_this_account():
    aws = FakeAws(lambda service, operation, request: {"Account": "123456789012"})
    api = HyperPodApi(aws)
    assert api.has_bucket("sagemaker-demo")
    api.upload("sagemaker-demo", "demo", {"on_create.sh": b"#!/bin/sh\n"})
    api.remove_uploads("sagemaker-demo", "demo", ["on_create.sh"])
    sent = [request for service, _, request in aws.calls if service == "s3"]
    assert len(sent) == 3 and {each["ExpectedBucketOwner"] for each in sent} == {"123456789012"}
    assert aws.operations().count("get_caller_identity") == 1
