"""What the cluster file refers to on AWS: buckets that are created or refused, scripts and secrets that must exist."""

from __future__ import annotations

import pytest

from dalsegno.errors import TargetError
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal
from dalsegno.targets.parallelcluster.config import render_config
from tests.targets.parallelcluster.files import FULL, MINIMAL, WALKTHROUGH, cluster_of, known_for
from tests.targets.parallelcluster.stage import Stage

DATA = WALKTHROUGH.replace("ml-cluster", "demo").replace("  key: my-keypair\n  allowed_ips: 203.0.113.0/24\n", "")
BUCKET = "cluster-data-bucket"
SCRIPT = "s3://our-scripts/nccl.sh"
SECRET = "arn:aws:secretsmanager:us-east-1:123456789012:secret:slurm"
DATABASE = f"database: {{uri: 'db.example.com:3306', user: slurm, password_secret: '{SECRET}'}}"
REFERS = MINIMAL.replace("us-east-1}", f"us-east-1, {DATABASE}, actions: [{{script: '{SCRIPT}'}}]}}")


def test_bucket_of_a_data_repository_is_created_once_and_kept(stage: Stage):
    stage.up(DATA)
    assert BUCKET in stage.account.buckets and f"creating bucket {BUCKET}" in stage.said
    stage.target().destroy(stage.said.append)
    assert BUCKET in stage.account.buckets
    plan = stage.target().plan(cluster_of(DATA))
    assert plan.missing_buckets == () and not any(BUCKET in each.names for each in plan.resources)
    stage.up(DATA)
    assert stage.account.calls.count("create_bucket") == 1


def test_bucket_that_exists_is_only_linked(stage: Stage):
    stage.account.buckets.add(BUCKET)
    stage.up(DATA)
    assert "create_bucket" not in stage.account.calls
    assert stage.account.repositories == {f"s3://{BUCKET}": "AVAILABLE"}


def test_scripts_bucket_that_also_mirrors_data_is_left_to_the_stack(stage: Stage):
    own = "dalsegno-demo-123456789012-ap-northeast-1"
    stage.up(DATA.replace(BUCKET, f"{own}/data"))
    assert own in stage.account.buckets and "create_bucket" not in stage.account.calls


def test_bucket_that_nobody_lets_us_use_is_refused_before_anything_is_created(stage: Stage):
    stage.account.refusals = [("head_bucket", CloudRefusal.NOT_THERE), ("head_bucket", CloudRefusal.DENIED)] * 2
    fault = f"bucket {BUCKET}: it belongs to another account, or your credentials may not use it"
    assert any(line.startswith(fault) for line in stage.target().plan(cluster_of(DATA)).sentences())
    with pytest.raises(TargetError, match=fault):
        stage.up(DATA)
    assert stage.account.stacks == {}


def test_missing_scripts_and_secrets_are_refused_before_anything_is_created(stage: Stage):
    missing = {
        f"script {SCRIPT}: it does not exist; new machines would fail",
        f"secret {SECRET}: it does not exist in this region, or is being deleted",
    }
    assert missing <= set(stage.target().plan(cluster_of(REFERS)).sentences())
    with pytest.raises(TargetError, match=r"script s3://our-scripts/nccl\.sh: it does not exist"):
        stage.up(REFERS)
    stage.account.objects[SCRIPT] = b""
    with pytest.raises(TargetError, match="it does not exist in this region"):
        stage.up(REFERS)
    stage.account.secrets[SECRET] = {"DeletedDate": "2026-11-01"}
    with pytest.raises(TargetError, match="is being deleted"):
        stage.up(REFERS)
    assert stage.account.stacks == {}
    stage.account.secrets[SECRET] = {}
    stage.up(REFERS)


def test_script_that_may_not_be_read_is_a_remark_and_no_refusal(stage: Stage):
    stage.account.secrets[SECRET] = {}
    stage.account.refusals = [("head_object", CloudRefusal.DENIED)]
    plan = stage.target().plan(cluster_of(REFERS))
    assert not any(check.fault for check in plan.checks)
    assert f"check script {SCRIPT}: your credentials may not read it, so it was not checked" in plan.details()


def test_expired_credentials_are_not_taken_for_a_missing_script(stage: Stage):
    stage.account.refusals = [("head_object", CloudRefusal.EXPIRED)]
    with pytest.raises(CloudError) as raised:
        stage.target().plan(cluster_of(REFERS))
    assert raised.value.refusal is CloudRefusal.EXPIRED


GROUPED = MINIMAL.replace("us-east-1}", "us-east-1, capacity_reservation: cr-0123456789abcdef0, {}}")
RESERVED = {
    "CapacityReservationId": "cr-0123456789abcdef0", "InstanceType": "p5.48xlarge", "AvailabilityZone": "us-east-1a",
    "TotalInstanceCount": 2, "AvailableInstanceCount": 2, "State": "active",
    "PlacementGroupArn": "arn:aws:ec2:us-east-1:123456789012:placement-group/near",
}  # fmt: skip


def test_reservation_in_a_placement_group_is_used_in_that_group(stage: Stage):
    """EC2 starts no machine of such a reservation outside its placement group."""
    stage.account.reservations = [RESERVED]
    for settings, fault in (
        ("key: k, allowed_ips: 203.0.113.0/24", "needs `placement_group_name: near` for it"),
        ("placement_group_name: far", "needs `placement_group_name: near` for it"),
        ("placement_group_name: near", "placement group near: it does not exist with strategy `cluster`"),
    ):
        with pytest.raises(TargetError, match=fault):
            stage.up(GROUPED.replace("{}}", f"{settings}}}"))
    stage.account.groups["near"] = "spread"
    with pytest.raises(TargetError, match="it does not exist with strategy `cluster`"):
        stage.up(GROUPED.replace("{}}", "placement_group_name: near}"))
    stage.account.groups["near"] = "cluster"
    stage.up(GROUPED.replace("{}}", "placement_group_name: near}"))
    (queue,) = stage.config()["Scheduling"]["SlurmQueues"]
    assert queue["Networking"]["PlacementGroup"] == {"Enabled": True, "Name": "near"}


def test_queue_may_be_outside_the_common_placement_group(stage: Stage):
    text = MINIMAL.replace("us-east-1}", "us-east-1, placement_group_name: near, queues: {train: {{}}}}")
    for settings, group in (
        ("", {"Enabled": True, "Name": "near"}),
        ("placement_group: false", {"Enabled": False}),
        ("placement_group_name: far", {"Enabled": True, "Name": "far"}),
    ):
        cluster = cluster_of(text.replace("{{}}", f"{{{settings}}}"))
        (queue,) = render_config(cluster, known_for(cluster))["Scheduling"]["SlurmQueues"]
        assert queue["Networking"]["PlacementGroup"] == group


def test_scripts_on_the_web_are_not_asked_for(stage: Stage):
    """Only a machine of the cluster can tell whether it reaches them."""
    stage.account.objects[SCRIPT] = b""
    checked = [check.what for check in stage.target().plan(cluster_of(FULL.replace("name: big", "name: demo"))).checks]
    assert f"script {SCRIPT}" in checked and not any("example.com/start.sh" in each for each in checked)
