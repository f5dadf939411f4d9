"""Tests of rendering for ParallelCluster: cluster.yaml, the template of prerequisites, names of nodes, and changes."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import yaml

from dalsegno.errors import TargetError
from dalsegno.targets.cloud.consequences import ChangeEffect, SettingChange
from dalsegno.targets.cloud.cost import PriceTable
from dalsegno.targets.cloud.node_plans import compute_plan, head_plan
from dalsegno.targets.parallelcluster.changes import UpdatePolicy, find_changes, policies, policy_of
from dalsegno.targets.parallelcluster.config import (
    as_named_there,
    config_text,
    custom_settings,
    node_names,
    render_config,
)
from dalsegno.targets.parallelcluster.folder import PclusterStage, PclusterState
from dalsegno.targets.parallelcluster.plan import (
    CapacityReservation,
    check_reservations,
    estimate_cost,
    notes,
    parse_reservation,
    queue_ends,
    quota_needs,
    zone_of_network,
)
from dalsegno.targets.parallelcluster.prerequisites import (
    Prerequisites,
    given,
    merge_outputs,
    new_resources,
    render_template,
    settings_of,
)
from dalsegno.targets.parallelcluster.scripts import site_of
from dalsegno.wire.cloud_notice import parse_cloud
from tests.targets.parallelcluster.files import BLOCK, FILES, FULL, MINIMAL, WALKTHROUGH, cluster_of, known_for
from tests.targets.parallelcluster.test_references import DATABASE


@pytest.mark.parametrize("name", FILES)
def test_config_is_as_recorded(golden, name):
    cluster = cluster_of(FILES[name])
    text = config_text(cluster, render_config(cluster, known_for(cluster)))
    golden(f"parallelcluster/{name}.yaml", text)
    assert yaml.safe_load(text) == render_config(cluster, known_for(cluster))


@pytest.mark.parametrize("name", FILES)
def test_template_is_as_recorded(golden, name):
    cluster = cluster_of(FILES[name])
    template = render_template(cluster, given(cluster), settings_of(cluster).bucket or "dalsegno-bucket")
    golden(f"parallelcluster/{name}-prerequisites.json", json.dumps(template, indent=1) + "\n")


# Names
def test_nodes_have_the_names_that_parallelcluster_gives_them():
    cluster = cluster_of(FULL)
    assert node_names(settings_of(cluster).queues[1])[0] == ["cpu-st-cpu-1"]
    assert node_names(settings_of(cluster).queues[1])[1][-1] == "cpu-dy-cpu-15"
    there = as_named_there(cluster)
    assert len(there.nodes) == 8 + 16 and there.partitions[0].nodes[0] == "train-st-train-1"
    assert {node.gpus for node in there.nodes if node.name.startswith("train")} == {8}


# Prerequisites
OUTPUTS = {
    "PublicSubnet": "subnet-0aaaaaaaaaaaaaaaa",
    "PrimaryPrivateSubnet": "subnet-0bbbbbbbbbbbbbbbb",
    "SecurityGroup": "sg-0aaaaaaaaaaaaaaaa",
    "FSxLustreFilesystemId": "fs-0aaaaaaaaaaaaaaaa",
    "FSxORootVolumeId": "fsvol-0aaaaaaaaaaaaaaaa",
    "S3BucketName": "a-bucket",
}


def test_outputs_of_published_stacks_are_merged():
    cluster = cluster_of(WALKTHROUGH)
    known = merge_outputs(given(cluster), cluster, OUTPUTS)
    assert known == Prerequisites(
        "subnet-0aaaaaaaaaaaaaaaa",
        ("subnet-0bbbbbbbbbbbbbbbb",),
        ("sg-0aaaaaaaaaaaaaaaa",),
        {"home": "fsvol-0aaaaaaaaaaaaaaaa", "fsx": "fs-0aaaaaaaaaaaaaaaa"},
        "a-bucket",
    )
    assert [each.noun for each in new_resources(cluster, known, ["s3://a"])] == ["data repository association"]


def test_value_in_the_file_takes_precedence_over_outputs():
    cluster = cluster_of(FULL)
    known = merge_outputs(given(cluster), cluster, OUTPUTS)
    assert known == given(cluster)


def test_one_output_is_not_used_for_two_file_systems():
    cluster = cluster_of(
        BLOCK.replace("type: lustre, size: 4800G}", "type: lustre, size: 4800G}, {name: b, mount: /b, type: lustre, "
                      "size: 1200G}")
    )  # fmt: skip
    assert merge_outputs(given(cluster), cluster, OUTPUTS).storage == {"fsx": "fs-0aaaaaaaaaaaaaaaa"}


def test_template_has_only_what_is_missing():
    cluster = cluster_of(FULL)
    template = render_template(cluster, given(cluster), "our-scripts")
    assert list(template["Resources"]) == ["NodePolicy"]


def test_security_group_lets_all_traffic_pass_inside_in_both_directions():
    cluster = cluster_of(MINIMAL)
    resources = render_template(cluster, given(cluster), "b")["Resources"]
    group = {"Ref": "EfaSecurityGroup"}
    inside = resources["EfaInside"]["Properties"]
    outside = resources["EfaOutside"]["Properties"]
    assert inside == {"GroupId": group, "SourceSecurityGroupId": group, "IpProtocol": "-1"}
    assert outside == {"GroupId": group, "DestinationSecurityGroupId": group, "IpProtocol": "-1"}


def test_bucket_outlives_the_stack_and_machines_may_only_read_their_scripts():
    cluster = cluster_of(MINIMAL)
    resources = render_template(cluster, given(cluster), "b")["Resources"]
    assert resources["Bucket"]["DeletionPolicy"] == "Retain"
    statements = resources["NodePolicy"]["Properties"]["PolicyDocument"]["Statement"]
    assert statements == [
        {
            "Effect": "Allow",
            "Action": ["s3:GetObject"],
            "Resource": [{"Fn::Sub": "arn:${AWS::Partition}:s3:::b/dalsegno/demo/*"}],
        }
    ]


# Reservations and quotas
RESERVED = CapacityReservation("cr-0123456789abcdef0", "p5en.48xlarge", "us-east-2a", "use2-az1", 4, 4, True, True)
SUBNET = {"subnet-1": "us-east-2a"}


@pytest.mark.parametrize(
    ("found", "zones", "fault"),
    [
        (RESERVED, SUBNET, ""),
        (None, SUBNET, "it does not exist in this account"),
        (RESERVED, {"subnet-1": "us-east-2b"}, "it is in us-east-2a, but subnet-1 is in us-east-2b"),
        (replace(RESERVED, instance_type="p5.48xlarge"), SUBNET, "it holds p5.48xlarge, but queue `train` has"),
        (replace(RESERVED, total=2), SUBNET, "it holds 2 machines, but queue `train` has 4"),
        (replace(RESERVED, available=3), SUBNET, "only 3 of its 4 machines are free, and 4 are needed"),
        (replace(RESERVED, active=False), SUBNET, "it is not active"),
        (replace(RESERVED, block=False), SUBNET, "queue `train` needs `capacity_type: ONDEMAND` for it"),
    ],
)
def test_reservation_must_fit_the_queue_and_its_zone(found, zones, fault):
    own = settings_of(cluster_of(BLOCK))
    there = {"cr-0123456789abcdef0": found} if found else {}
    (check,) = check_reservations(own, there, zones, running=False)
    assert check.fault.startswith(fault) and bool(check.fault) == bool(fault)


@pytest.mark.parametrize(
    ("found", "ends"),
    [
        (RESERVED, {}),
        (replace(RESERVED, ends_at=1795003320.0), {"train": 1795003320.0 - 30 * 60}),
        (replace(RESERVED, ends_at=1795003320.0, instance_type="p6e-gb200.36xlarge"), {"train": 1795003320.0 - 3600}),
        (replace(RESERVED, ends_at=1795003320.0, block=False), {}),
    ],
)
def test_machines_of_a_capacity_block_are_taken_before_its_end(found, ends):
    assert queue_ends(settings_of(cluster_of(BLOCK)), {RESERVED.id: found}) == ends


def test_end_of_a_reservation_is_read_from_ec2():
    end = datetime(2026, 11, 18, 12, 2, tzinfo=UTC)
    assert parse_reservation({"CapacityReservationId": "cr-1", "EndDate": end}).ends_at == 1795003320.0
    assert parse_reservation({"CapacityReservationId": "cr-1"}).ends_at is None


def test_node_agents_get_their_cloud_and_the_end_of_their_block():
    cluster = cluster_of(BLOCK)
    state = PclusterState(PclusterStage.UP, "c0ffee", "us-east-2", "3.16.1", bucket="b")
    site = site_of(cluster, state, "k", {"train": 1795000000.0})
    answer = json.loads(site.cloud)
    assert answer["cloud"] == "ec2" and set(answer["ends"]) == set(site.nodes)
    assert parse_cloud(site.cloud, site.nodes[0]).ends_at == 1795000000.0
    path = "/opt/slurm/etc/dalsegno-cloud.json"
    assert [file.content for file in head_plan(site).files if file.path == path] == [site.cloud]
    (agent,) = compute_plan(site).services
    assert agent.argv[-2:] == ("--cloud", path)


def test_nodes_that_run_already_may_have_used_the_reservation():
    own = settings_of(cluster_of(BLOCK))
    (check,) = check_reservations(own, {RESERVED.id: replace(RESERVED, available=0)}, SUBNET, running=True)
    assert check.fault == ""


def test_new_network_is_in_the_zone_of_the_reservation():
    own = settings_of(cluster_of(BLOCK))
    assert zone_of_network(own, {RESERVED.id: RESERVED}) == "us-east-2a"
    elsewhere = replace(own, availability_zone="us-east-2c")
    with pytest.raises(TargetError, match="would be in us-east-2c, but the reserved capacity is in us-east-2a"):
        zone_of_network(elsewhere, {RESERVED.id: RESERVED})
    two = {"a": RESERVED, "b": replace(RESERVED, zone="us-east-2b")}
    with pytest.raises(TargetError, match="different availability zones: us-east-2a, us-east-2b"):
        zone_of_network(own, two)


def test_quotas_are_counted_in_vcpus_of_the_largest_size():
    needs = {need.code: need.vcpus for need in quota_needs(settings_of(cluster_of(FULL)))}
    assert needs == {"L-1216C47A": 32 + 2 * 8, "L-417A185B": 8 * 192, "L-34B43A08": 16 * 32}
    assert [need.name for need in quota_needs(settings_of(cluster_of(BLOCK)))] == ["On-Demand standard instances"]


# Price
def test_price_counts_machines_that_always_run_and_names_those_on_demand():
    cluster = cluster_of(FULL)
    cost = estimate_cost(cluster, PriceTable())
    lines = {line.what: line.count for line in cost.lines}
    assert lines["p5.48xlarge"] == 8 and lines["c7i.8xlarge"] == 1 and "NAT gateway" not in lines
    assert cost.usd_per_hour > 8 * 8 * 6.88
    said = notes(cluster, PriceTable())
    assert said[0] == "prices are those of us-east-1; us-west-2 may differ"
    assert said[1].startswith("starts up to 15 more nodes for jobs (up to 21.42 USD per hour), and stops them after 20")
    assert "SPOT" in said[2]
    assert any("paid in advance" in line for line in notes(cluster_of(BLOCK), PriceTable()))


# Changes
def change(old: str, new: str) -> list[SettingChange]:
    first, second = cluster_of(old), cluster_of(new)
    strategy = settings_of(second).queue_update
    return list(
        find_changes(render_config(first, known_for(first)), render_config(second, known_for(second)), strategy)
    )


QUEUE = "Scheduling/SlurmQueues[train]"
MORE = ", {name: cpu, nodes: 1, instance: m5.xlarge}]"


@pytest.mark.parametrize(
    ("old", "new", "path", "effect"),
    [
        ("nodes: 2", "nodes: 4", f"{QUEUE}/ComputeResources[train]/MinCount", ChangeEffect.IN_PLACE),
        ("nodes: 2", "nodes: 1", f"{QUEUE}/ComputeResources[train]/MinCount", ChangeEffect.AS_JOBS_END),
        ("p5.48xlarge}", "p4d.24xlarge}", f"{QUEUE}/ComputeResources[train]/InstanceType", ChangeEffect.STOPS_NODES),
        ("p5.48xlarge}]", "p5.48xlarge}" + MORE, "Scheduling/SlurmQueues[cpu]", ChangeEffect.IN_PLACE),
        ("us-east-1}", "us-east-1, root_volume: 300G}", f"{QUEUE}/ComputeSettings/LocalStorage/RootVolume/Size",
         ChangeEffect.AS_JOBS_END),
        ("us-east-1}", "us-east-1, scaledown_idletime: 5m}", "Scheduling/SlurmSettings/ScaledownIdletime",
         ChangeEffect.STOPS_NODES),
        ("us-east-1}", "us-east-1, os: alinux2023}", "Image/Os", ChangeEffect.NEEDS_NEW_CLUSTER),
        ("us-east-1}", "us-east-1, head_root_volume: 600G}", "HeadNode/LocalStorage/RootVolume/Size",
         ChangeEffect.NEEDS_NEW_CLUSTER),
        ("us-east-1}", "us-east-1, gpu_health_checks: true}", f"{QUEUE}/HealthChecks/Gpu/Enabled",
         ChangeEffect.IN_PLACE),
        ("instance: p5.48xlarge}]", "instance: p5.48xlarge, time_limit: 2d}]", f"{QUEUE}/CustomSlurmSettings",
         ChangeEffect.IN_PLACE),
    ],
)  # fmt: skip
def test_each_change_has_the_effect_that_parallelcluster_gives_it(old, new, path, effect):
    assert old in MINIMAL
    found = {each.path: each.effect for each in change(MINIMAL, MINIMAL.replace(old, new))}
    assert found[path] is effect, found


def test_strategy_decides_what_happens_to_nodes_that_change():
    text = MINIMAL.replace("us-east-1}", "us-east-1, queue_update: {strategy}, root_volume: {size}}")

    def effects(strategy: str) -> set[ChangeEffect]:
        made = [text.replace("{strategy}", strategy).replace("{size}", size) for size in ("200G", "300G")]
        return {each.effect for each in change(*made)}

    assert effects("DRAIN") == {ChangeEffect.AS_JOBS_END}
    assert effects("TERMINATE") == {ChangeEffect.ENDS_JOBS}
    assert effects("COMPUTE_FLEET_STOP") == {ChangeEffect.STOPS_NODES}


def test_config_without_a_storage_unmounts_it_and_names_what_stays():
    found = change(WALKTHROUGH, WALKTHROUGH.replace("  - {name: scratch", "  # - {name: scratch").replace(
        "  - {name: home, mount: /home, type: openzfs, size: 512G, home: true}\n", ""))  # fmt: skip
    (gone,) = [each for each in found if each.path == "SharedStorage[home]"]
    kept = "it is unmounted everywhere; fsvol-00000000000000000 stays with its files"
    assert (gone.effect, gone.detail) == (ChangeEffect.AS_JOBS_END, kept)


def test_storage_that_parallelcluster_created_is_kept_by_it_and_costs_money():
    last = change(FULL, FULL.partition("storage:")[0])
    details = {each.path: each.detail for each in last}
    assert "ParallelCluster keeps it with its files, and AWS bills it" in details["SharedStorage[disk]"]
    assert details["SharedStorage[fsx]"] == "it is unmounted everywhere; fs-0123456789abcdef0 stays with its files"


def test_setting_without_a_policy_has_that_of_the_setting_above():
    assert policy_of("Scheduling/SlurmQueues[a]/CustomSlurmSettings/MaxTime") is UpdatePolicy.SUPPORTED
    assert policy_of("HeadNode/CustomActions/OnNodeConfigured/Sequence") is UpdatePolicy.UNSUPPORTED
    assert policy_of("NothingKnown/At/All") is UpdatePolicy.UNSUPPORTED
    assert len(policies()) > 250


def test_priority_of_the_file_is_set_with_and_without_accounting():
    written = "{age: 7, half_life: 1d, favor_small: true, tres: {gres/gpu: 5}}"
    without = custom_settings(cluster_of(MINIMAL + "slurm: {priority: {age: 7, favor_small: true}}\n"))
    assert (without["PriorityWeightAge"], without["PriorityFavorSmall"]) == ("7", "YES")
    assert custom_settings(cluster_of(MINIMAL)) == {}, "nothing is said, and nothing is set"
    database = MINIMAL.replace("us-east-1}", f"us-east-1, {DATABASE}}}")
    found = custom_settings(cluster_of(f"{database}slurm: {{priority: {written}}}\n"))
    assert found["PriorityDecayHalfLife"] == "1-00:00:00" and found["PriorityWeightTRES"] == "gres/gpu=5"
    assert "PriorityMaxAge" not in found, "Slurm's default is ours"
