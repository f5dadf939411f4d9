"""The contract of a cloud target, for ParallelCluster: the real target, with a `pcluster` that returns recorded answers
as a process of its own, and an account of AWS in memory. `test_product.py` repeats parts of it on moto."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from dalsegno.errors import NotThere, TargetError
from dalsegno.system.processes import FakeRunner
from dalsegno.targets.base import CanForward, CanReboot, CanReplace, ClusterPhase
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal
from dalsegno.targets.cloud.progress import OperationState, ResourceEventKind
from dalsegno.targets.cloud.stacks import parse_event
from dalsegno.targets.folder import ClusterFolder, ClusterRole
from dalsegno.targets.parallelcluster.client import PclusterStatus, parse_cluster, parse_instance
from dalsegno.targets.parallelcluster.folder import read_state, write_state
from dalsegno.targets.parallelcluster.head import PclusterHead
from dalsegno.targets.parallelcluster.target import PclusterTarget
from dalsegno.targets.registry import is_elsewhere, open_existing, open_target
from tests.targets.parallelcluster.files import MINIMAL, WALKTHROUGH, cluster_of
from tests.targets.parallelcluster.stage import Stage

pytestmark = pytest.mark.cluster  # the tests start hundreds of processes

RESERVED = {
    "CapacityReservationId": "cr-0123456789abcdef0", "InstanceType": "p5.48xlarge", "AvailabilityZone": "us-east-1b",
    "TotalInstanceCount": 4, "AvailableInstanceCount": 4, "State": "active",
}  # fmt: skip


# Plan and apply
def test_plan_of_a_new_cluster_names_resources_price_time_and_quotas(stage: Stage):
    plan = stage.target().plan(cluster_of(MINIMAL))
    said = plan.sentences()
    assert said[0] == "creates demo on parallelcluster: 2 nodes (p5.48xlarge) in 1 partition"
    assert any(line.startswith("creates 1 network with a public and a private subnet") for line in said)
    assert any(line.startswith("costs about 110.") and "USD per hour" in line for line in said)
    assert "takes about 15 to 20 minutes" in said
    assert any("SSM" in line for line in said)
    assert any(line.startswith("check quota L-417A185B (On-Demand P instances)") for line in plan.details())
    assert not stage.folder.exists(), "a plan changes nothing"


def test_cluster_is_created_from_one_file(stage: Stage):
    stage.up()
    words = next(call for call in stage.calls if call[0] == "create-cluster")
    assert words[words.index("--rollback-on-failure") + 1] == "false"
    config = stage.config()
    assert config["HeadNode"]["Networking"]["SubnetId"] == "subnet-0a23456789abcdef0"
    assert config["Scheduling"]["SlurmQueues"][0]["Networking"]["SubnetIds"] == ["subnet-0b23456789abcdef0"]
    bucket = "dalsegno-demo-123456789012-us-east-1"
    scripts = {
        key.rpartition("/")[2] for key in stage.account.objects if key.startswith(f"s3://{bucket}/dalsegno/demo/")
    }
    assert {"head.sh", "compute.sh", "login.sh"} < scripts and len(scripts) == 4
    status = stage.target().status()
    assert (status.phase, status.target, status.problems) == (ClusterPhase.UP, "parallelcluster", ())
    assert [node.name for node in status.nodes] == ["train-st-train-1", "train-st-train-2"]
    assert status.facts["machines"] == "2 compute nodes of 2 run" and status.facts["head"] == "198.51.100.7"


def test_whole_walkthrough_is_one_file(stage: Stage):
    text = WALKTHROUGH.replace("ml-cluster", "demo")
    plan = stage.up(text)
    assert {each.noun for each in plan.resources} == {
        "network with a public and a private subnet", "FSx for OpenZFS volume", "FSx for Lustre file system",
        "S3 bucket", "data repository association",
    }  # fmt: skip
    assert stage.account.repositories == {"s3://cluster-data-bucket": "AVAILABLE"}
    assert "cluster-data-bucket" in stage.account.buckets
    assert "creates 1 S3 bucket (cluster-data-bucket)" in plan.sentences()
    key = stage.folder / "secret" / "my-keypair.pem"
    assert key.read_text().startswith("-----BEGIN") and key.stat().st_mode & 0o777 == 0o600
    assert [each["StorageType"] for each in stage.config()["SharedStorage"]] == ["FsxOpenZfs", "FsxLustre"]
    assert stage.target().plan(cluster_of(text)).empty


def test_change_that_needs_a_new_cluster_is_refused_before_anything_is_sent(stage: Stage):
    stage.up()
    before = len(stage.calls)
    with pytest.raises(TargetError, match=r"Image/Os cannot change on a running cluster"):
        stage.up(MINIMAL.replace("us-east-1}", "us-east-1, os: alinux2023}"))
    assert not any(call[0] == "update-cluster" for call in stage.calls[before:])
    assert stage.target().plan(cluster_of(MINIMAL)).empty


def test_change_that_would_end_jobs_waits_until_the_operator_has_stopped_the_nodes(stage: Stage):
    stage.up()
    changed = MINIMAL.replace("us-east-1}", "us-east-1, scaledown_idletime: 5m}")
    with pytest.raises(TargetError, match="needs all compute nodes stopped") as raised:
        stage.up(changed)
    assert "update-compute-fleet" in raised.value.hint and "STOP_REQUESTED" in raised.value.hint
    clusters = dict(stage.clusters)
    clusters["demo"]["fleet"] = "STOPPED"
    (stage.root / "fake" / "clusters.json").write_text(json.dumps(clusters))
    command = "pcluster update-compute-fleet --cluster-name demo --region us-east-1 --status START_REQUESTED"
    assert stage.target().status().problems == (f"its compute nodes are stopped: `{command}` starts them",)
    stage.up(changed)
    assert stage.config()["Scheduling"]["SlurmSettings"]["ScaledownIdletime"] == 5
    assert stage.clusters["demo"]["fleet"] == "RUNNING"


def test_plan_on_the_page_matches_the_command(stage: Stage):
    page = (Path(__file__).parents[3] / "docs" / "parallelcluster.md").read_text()
    file = page.partition("```yaml\n")[2].partition("```")[0]
    outside = page.partition("```yaml\n")[0] + page.partition("```yaml\n")[2].partition("```\n")[2]
    shown = [line.strip() for line in outside.splitlines() if line.startswith("    ")]
    said = stage.target().plan(cluster_of(file)).sentences()
    assert len(shown) >= 6 and [line for line in shown if line not in said] == []


# Interruptions and failures
def test_interrupted_creation_is_followed_and_not_started_again(stage: Stage):
    stage.scenario(create=["CREATE_IN_PROGRESS"] * 3 + ["CREATE_COMPLETE"])
    target = stage.target()
    plan = target.plan(cluster_of(MINIMAL))

    def interrupt(line: str) -> None:
        if line.startswith("creation of demo"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        target.apply(plan, interrupt)
    assert stage.target().summary().phase is ClusterPhase.HALF_MADE
    again = stage.target().plan(cluster_of(MINIMAL))
    assert again.sentences()[0] == "follows the creation of demo, which an earlier command started"
    stage.target().apply(again, stage.said.append)
    assert [call[0] for call in stage.calls].count("create-cluster") == 1
    assert stage.target().status().phase is ClusterPhase.UP


def test_up_interrupted_during_the_stack_continues_from_there(stage: Stage):
    target = stage.target()

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        target.apply(target.plan(cluster_of(MINIMAL)), interrupt)
    stage.up()
    assert stage.account.calls.count("create_stack") == 1 and stage.target().status().phase is ClusterPhase.UP


def test_failed_creation_names_the_resource_keeps_the_logs_and_is_cleaned_up_by_the_next_up(stage: Stage):
    stage.scenario(create=["CREATE_IN_PROGRESS", "CREATE_FAILED"], failure="no capacity: InsufficientInstanceCapacity")
    with pytest.raises(TargetError) as raised:
        stage.up()
    assert "creation of demo failed: HeadNode (AWS::EC2::Instance): no capacity" in raised.value.what
    assert any(line.startswith("FAILED: HeadNode") for line in stage.said)
    assert "earlier operation" not in raised.value.what and str(stage.folder / "logs") in raised.value.hint
    logs = stage.folder / "logs"
    assert (logs / "cluster-logs.tar.gz").exists() and "HeadNode" in (logs / "events.jsonl").read_text()
    status = stage.target().status()
    assert status.phase is ClusterPhase.HALF_MADE
    assert "ParallelCluster reports HeadNodeBootstrapFailure: Failed to run a script" in status.problems
    stage.scenario()
    plan = stage.target().plan(cluster_of(MINIMAL))
    assert "deletes what a failed creation or deletion left, after its logs are saved" in plan.sentences()


def test_failed_stack_names_its_resource_and_is_made_again(stage: Stage):
    stage.account.stack_fails = "The maximum number of VPCs has been reached."
    with pytest.raises(TargetError, match=r"Vpc \(AWS::EC2::VPC\): The maximum number of VPCs"):
        stage.up()
    stage.account.stack_fails = ""
    stage.up()
    assert stage.account.calls.count("create_stack") == 2 and stage.target().status().phase is ClusterPhase.UP


def test_scripts_are_not_written_to_a_bucket_of_another_account(stage: Stage):
    """The owner of the bucket decides what runs as root on the nodes."""
    stage.account.bucket_owner = "999999999999"
    with pytest.raises(CloudError) as raised:
        stage.up()
    assert raised.value.refusal is CloudRefusal.DENIED and stage.account.objects == {}


def test_stack_without_changes_is_no_error_and_a_refused_template_is_one(stage: Stage):
    stage.up()
    resources, (name, stack) = stage.target()._aws("us-east-1"), next(iter(stage.account.stacks.items()))
    resources.put_stack(name, stack["template"], {}, stage.said.append)
    stage.account.refusals.append(("update_stack", CloudRefusal.INVALID))
    with pytest.raises(CloudError, match="as the test asked"):
        resources.put_stack(name, {"Resources": {"Wrong": {"Type": "Wrong"}}}, {}, stage.said.append)


def test_refused_config_shows_all_faults_and_is_not_kept(stage: Stage):
    faults = [{"level": "ERROR", "type": "X", "message": f"fault {number}"} for number in (1, 2)]
    answer = {"message": "Invalid cluster configuration.", "configurationValidationErrors": faults}
    stage.scenario(refuse={"create-cluster": answer})
    with pytest.raises(CloudError, match="fault 1\n  fault 2") as raised:
        stage.up()
    assert raised.value.refusal is CloudRefusal.INVALID and not (stage.folder / "pcluster.yaml").exists()


def test_refused_update_leaves_the_record_of_what_runs(stage: Stage):
    stage.up()
    stage.scenario(refuse={"update-cluster": "no"})
    with pytest.raises(TargetError):
        stage.up(MINIMAL.replace("nodes: 2", "nodes: 3"))
    stage.scenario()
    plan = stage.target().plan(cluster_of(MINIMAL.replace("nodes: 2", "nodes: 3")))
    assert any("MinCount: 2 → 3" in line for line in plan.sentences())


@pytest.mark.parametrize(
    ("message", "refusal"),
    [
        ("Unable to locate credentials", CloudRefusal.NO_CREDENTIALS),
        ("The security token included in the request is expired", CloudRefusal.EXPIRED),
        ("An error occurred (InvalidClientTokenId) when calling X: bad", CloudRefusal.WRONG_CREDENTIALS),
        ("An error occurred (AccessDenied) when calling X: no", CloudRefusal.DENIED),
        ("Could not connect to the endpoint URL", CloudRefusal.UNREACHABLE),
        ("InsufficientInstanceCapacity in us-east-1a", CloudRefusal.CAPACITY),
    ],
)
def test_refusals_of_pcluster_are_named_with_a_fix(stage: Stage, message: str, refusal: CloudRefusal):
    stage.scenario(refuse={"describe-cluster": message})
    with pytest.raises(CloudError) as raised:
        stage.target().plan(cluster_of(MINIMAL))
    assert raised.value.refusal is refusal and raised.value.hint


def test_missing_credentials_are_named_before_anything_else(stage: Stage):
    stage.account.refusals.append(("get_caller_identity", CloudRefusal.NO_CREDENTIALS))
    with pytest.raises(CloudError, match="no credentials") as raised:
        stage.target().plan(cluster_of(MINIMAL))
    assert "aws configure" in raised.value.hint


def test_requests_that_are_throttled_for_minutes_fail(stage: Stage):
    stage.scenario(throttle=100)
    with pytest.raises(CloudError) as raised:
        stage.target().plan(cluster_of(MINIMAL))
    assert raised.value.refusal is CloudRefusal.THROTTLED


def test_too_small_a_quota_is_refused_before_anything_is_created(stage: Stage):
    stage.account.quota = 96
    plan = stage.target().plan(cluster_of(MINIMAL))
    fault = "quota L-417A185B (On-Demand P instances): the cluster needs 384 vCPUs, and 96 are allowed"
    assert fault in plan.sentences()
    with pytest.raises(TargetError, match="needs 384 vCPUs"):
        stage.target().apply(plan, stage.said.append)
    assert stage.account.stacks == {} and not stage.folder.exists()


KEYED = MINIMAL.replace("us-east-1}", "us-east-1, key: k, allowed_ips: 203.0.113.0/24}")


@pytest.mark.parametrize("system", ["ubuntu2204", "ubuntu2404"])
def test_rsa_key_on_ubuntu_is_refused_before_anything_is_created(stage: Stage, system: str):
    stage.account.keys["k"] = "rsa"
    plan = stage.target().plan(cluster_of(KEYED.replace("key: k", f"key: k, os: {system}")))
    assert any(
        f"key pair k: it is an RSA key, which ParallelCluster refuses with {system}" in each
        for each in plan.sentences()
    )
    with pytest.raises(TargetError, match="it is an RSA key"):
        stage.target().apply(plan, stage.said.append)
    assert stage.account.stacks == {} and not stage.folder.exists()


@pytest.mark.parametrize(("system", "kind"), [("alinux2023", "rsa"), ("rhel9", "rsa"), ("ubuntu2204", "ed25519")])
def test_key_pair_of_ec2_is_used_with_the_private_key_of_the_user(stage: Stage, monkeypatch, system: str, kind: str):
    monkeypatch.setenv("HOME", str(stage.root))
    stage.account.keys["k"] = kind
    text = KEYED.replace("key: k", f"key: k, os: {system}")
    private = stage.root / ".ssh/k.pem"
    expected = f"check the private key of k: ssh expects it in {private}, or in its agent"
    assert expected in stage.target().plan(cluster_of(text)).details()
    private.parent.mkdir()
    private.touch()
    plan = stage.up(text)
    assert not plan.new_key and expected not in plan.details()
    assert stage.account.keys == {"k": kind}
    assert str(private) in stage.target().shell([], {}, "/").argv


def test_network_is_made_in_the_zone_of_the_reservation(stage: Stage):
    stage.account.reservations, stage.account.zone = [RESERVED], "us-east-1b"
    stage.up(MINIMAL.replace("us-east-1}", "us-east-1, capacity_reservation: cr-0123456789abcdef0}"))
    template = stage.account.stacks["dalsegno-demo"]["template"]
    assert template["Resources"]["PrivateSubnet"]["Properties"]["AvailabilityZone"] == "us-east-1b"
    queue = stage.config()["Scheduling"]["SlurmQueues"][0]
    assert queue["Networking"]["PlacementGroup"] == {"Enabled": False}


def test_reservation_in_another_zone_is_refused(stage: Stage):
    stage.account.reservations = [RESERVED]
    subnet = "head_subnet: subnet-0123456789abcdef0"
    text = MINIMAL.replace("us-east-1}", f"us-east-1, {subnet}, capacity_reservation: cr-0123456789abcdef0}}")
    with pytest.raises(TargetError, match="it is in us-east-1b, but subnet-0123456789abcdef0 is in us-east-1a"):
        stage.up(text)


def test_only_reservations_that_do_not_exist_are_reported_as_missing(stage: Stage):
    stage.account.reservations = [{**RESERVED, "AvailabilityZone": "us-east-1a"}]
    queues = "queues: {more: {capacity_reservation: cr-00000000000000000}}"
    text = MINIMAL.replace("us-east-1}", f"us-east-1, capacity_reservation: cr-0123456789abcdef0, {queues}}}")
    text = text.replace("p5.48xlarge}]", "p5.48xlarge}, {name: more, nodes: 1, instance: p5.48xlarge}]")
    checks = stage.target().plan(cluster_of(text)).checks
    found = {check.what: check.fault for check in checks if check.what.startswith("capacity reservation")}
    assert found == {
        "capacity reservation cr-0123456789abcdef0": "",
        "capacity reservation cr-00000000000000000": "it does not exist in this account",
    }


# Versions and other clusters
def test_version_is_pinned(stage: Stage):
    stage.up()
    with pytest.raises(TargetError, match=r"created with ParallelCluster 3\.16\.1, and the file says 3\.15\.0"):
        stage.target().plan(cluster_of(MINIMAL.replace("us-east-1}", "us-east-1, version: 3.15.0}")))


def test_other_version_on_path_is_refused_unless_uv_or_pipx_can_run_the_pinned_one(stage: Stage):
    stage.scenario(version="3.13.0")
    with pytest.raises(TargetError, match=r"ParallelCluster 3\.16\.1 is not installed; the one on PATH is 3\.13\.0"):
        stage.target().plan(cluster_of(MINIMAL))
    uvx = stage.root / "bin" / "uvx"
    uvx.write_text('#!/bin/sh\nshift 3\nexec "$(dirname "$0")/pcluster" "$@"\n')
    uvx.chmod(0o755)
    (stage.root / "bin" / "dirname").symlink_to(shutil.which("dirname") or "/usr/bin/dirname")
    assert not stage.target().plan(cluster_of(MINIMAL)).empty


def test_cluster_of_others_with_this_name_is_not_touched(stage: Stage):
    stage.up()
    shutil.rmtree(stage.folder)
    with pytest.raises(TargetError, match="which was not created from here"):
        stage.target().plan(cluster_of(MINIMAL))


def test_missing_stack_is_named(stage: Stage):
    with pytest.raises(NotThere, match="there is no stack `gone`"):
        stage.target().plan(cluster_of(MINIMAL.replace("us-east-1}", "us-east-1, stacks: [gone]}")))


# Removal
def test_down_names_data_and_removes_cluster_and_stack(stage: Stage):
    stage.up(WALKTHROUGH.replace("ml-cluster", "demo"))
    removal = stage.target().removal()
    assert removal.sentences([]) == [
        "deletes the files of storage demo-home (FSx OPENZFS, 512 GiB), demo-fsx (FSx LUSTRE, 1200 GiB)",
        "keeps bucket dalsegno-demo-123456789012-ap-northeast-1, bucket cluster-data-bucket",
    ]
    assert stage.target().destroy(stage.said.append)
    assert stage.account.stacks == {} and stage.clusters == {} and not stage.folder.exists()


def test_half_made_cluster_is_removed(stage: Stage):
    stage.account.stack_fails = "no"
    with pytest.raises(TargetError):
        stage.up()
    stage.account.stack_fails = ""
    assert stage.target().destroy(stage.said.append) and stage.account.stacks == {}


def test_cluster_that_vanished_is_created_again(stage: Stage):
    stage.up()
    (stage.root / "fake" / "clusters.json").write_text("{}")
    assert stage.target().status().phase is ClusterPhase.STOPPED
    stage.up()
    assert stage.target().status().phase is ClusterPhase.UP


def test_up_after_an_interrupted_down_waits_for_the_deletion_and_creates_the_cluster_again(stage: Stage):
    stage.up()
    stage.scenario(delete=["DELETE_IN_PROGRESS"] * 3 + ["DELETE_COMPLETE"])

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage.target().destroy(interrupt)
    assert stage.target().summary().phase is ClusterPhase.HALF_REMOVED
    said = stage.up().sentences()
    assert said[0] == "follows the deletion of demo, which an earlier command started" and said[1].startswith("creates")
    assert stage.target().status().phase is ClusterPhase.UP


@pytest.mark.parametrize("answer", [{}, {"clusterStatus": None}, {"clusterStatus": "NEW_WORD", "headNode": [1]},
                                    {"cluster": [], "failures": "x", "loginNodes": [None]}])  # fmt: skip
def test_answers_that_make_no_sense_are_never_taken_for_success(answer: dict[str, Any]):
    view = parse_cluster(answer)
    assert view.status is PclusterStatus.UNKNOWN and view.status.operation is OperationState.FAILED
    assert parse_instance({}).running is False and parse_event({}).kind is ResourceEventKind.OTHER


# Connections
def test_shell_goes_through_ssm_without_a_key_and_through_ssh_with_one(stage: Stage):
    stage.up()
    entry = stage.target().shell(["sinfo", "-N"], {}, "/")
    assert entry.argv[:3] == ["aws", "ssm", "start-session"] and "i-0123456789abcdef0" in entry.argv
    assert json.loads(entry.argv[-1]) == {"command": ["sudo -iu ubuntu -- sinfo -N"]}
    stage.target().destroy(stage.said.append)
    stage.up(MINIMAL.replace("us-east-1}", "us-east-1, key: k, allowed_ips: 203.0.113.0/24}"))
    entry = stage.target().shell(["echo", "a b"], {}, "/")
    assert entry.argv[0] == "ssh" and entry.argv[-2:] == ["ubuntu@198.51.100.7", "echo 'a b'"]
    assert str(stage.folder / "secret" / "k.pem") in entry.argv
    assert stage.target().shell([], {}, "/", host="train-st-train-1").argv[-1] == "ssh -t train-st-train-1"
    target = stage.target()
    assert isinstance(target, CanForward) and target.forward(["runs"]).argv[-1] == "/usr/local/bin/dalsegno runs"


FAKE_SSH = """#!/bin/sh
printf '%s\\n' "$*" >> "$FAKE_PCLUSTER/ssh"
case "$*" in
  *dalsegno-refresh*) [ ! -e "$FAKE_PCLUSTER/broken" ] ;;
  *sacctmgr\\ --immediate*) while read -r line; do echo "sacctmgr: $line"; echo " Adding Account(s)"; done ;;
  *show\\ config*) printf "Configuration data as of now\\nClusterName = the-stack\\n" ;;
  *show\\ node*) while read -r line; do echo "$line"; done < "$FAKE_PCLUSTER/nodes" ;;
esac
"""


def test_states_of_nodes_come_from_slurm_on_the_head_over_ssh(stage: Stage):
    stage.up(MINIMAL.replace("us-east-1}", "us-east-1, key: k, allowed_ips: 203.0.113.0/24}"))
    ssh = stage.root / "bin" / "ssh"
    ssh.write_text(FAKE_SSH)
    ssh.chmod(0o755)
    nodes = {"train-st-train-1": "IDLE+CLOUD", "train-st-train-2": "DOWN+CLOUD Reason=(Code:X)no capacity [slurm@now]"}
    lines = [f"NodeName={name} State={state} CPUTot=8 RealMemory=1000\n" for name, state in nodes.items()]
    (stage.root / "fake" / "nodes").write_text("".join(lines))
    status = stage.target().status()
    assert {node.name: node.state for node in status.nodes} == {"train-st-train-1": "idle", "train-st-train-2": "down"}
    assert status.facts["connection"] == "ssh" and "(Code:X)no capacity" in status.nodes[1].reason
    asked = (stage.root / "fake" / "ssh").read_text()
    assert "ubuntu@198.51.100.7" in asked and "BatchMode=yes" in asked and "accept-new" in asked


def test_changed_users_reach_the_machines_that_run_already(stage: Stage):
    keyed = MINIMAL.replace("us-east-1}", "us-east-1, key: k, allowed_ips: 203.0.113.0/24}")
    stage.up(keyed)
    ssh = stage.root / "bin" / "ssh"
    ssh.write_text(FAKE_SSH)
    ssh.chmod(0o755)
    states = {"train-st-train-1": "IDLE+CLOUD", "train-st-train-2": "IDLE+CLOUD+POWERED_DOWN"}
    lines = [f"NodeName={name} State={state} CPUTot=8 RealMemory=1000\n" for name, state in states.items()]
    (stage.root / "fake" / "nodes").write_text("".join(lines))
    before = dict(stage.account.objects)
    (stage.root / "fake" / "broken").touch()
    with pytest.raises(TargetError, match="the new scripts failed on 2 of 2 machines"):
        stage.up(f"{keyed}users: [{{name: ada}}]\n")
    (stage.root / "fake" / "broken").unlink()
    (stage.root / "fake" / "ssh").unlink()
    assert "finishes what an earlier `up` began" in stage.up(f"{keyed}users: [{{name: ada}}]\n").sentences()
    plan = stage.target().plan(cluster_of(f"{keyed}users: [{{name: bob}}]\n"))
    assert "runs the new set-up scripts on machines that run already; jobs continue" in plan.sentences()
    asked = (stage.root / "fake" / "ssh").read_text().splitlines()
    refreshed = sorted(line.partition("198.51.100.7 ")[2] for line in asked if "dalsegno-refresh" in line)
    assert refreshed == ["ssh train-st-train-1 'sudo dalsegno-refresh'", "sudo dalsegno-refresh"]
    changed = {key.rpartition("/")[2] for key, body in stage.account.objects.items() if body != before.get(key)}
    assert changed >= {"head.sh", "compute.sh", "login.sh"}
    assert stage.target().plan(cluster_of(f"{keyed}users: [{{name: ada}}]\n")).empty


def test_accounts_of_the_file_are_added_to_slurms_accounting(stage: Stage):
    secret = "arn:aws:secretsmanager:us-east-1:123456789012:secret:slurm"
    database = f"database: {{uri: 'db.example.com:3306', user: slurm, password_secret: '{secret}'}}"
    text = MINIMAL.replace("us-east-1}", f"us-east-1, key: k, allowed_ips: 203.0.113.0/24, {database}}}")
    ssh = stage.root / "bin" / "ssh"
    ssh.write_text(FAKE_SSH)
    ssh.chmod(0o755)
    stage.account.secrets[secret] = {}
    stage.up(f"{text}accounts: [{{name: ml}}]\nusers: [{{name: ada, accounts: [ml]}}]\n")
    asked = (stage.root / "fake" / "ssh").read_text().splitlines()
    assert re.search(r"sudo env \S+ COLUMNS=\d+ sacctmgr --immediate$", asked[-1])
    assert any("show assoc" in line and "cluster=the-stack" in line for line in asked), "slurmdbd's name of the cluster"
    more = cluster_of(f"{text}accounts: [{{name: ml}}, {{name: ops}}]\nusers: [{{name: ada, accounts: [ml]}}]\n")
    assert "changes accounts, users or QOS in Slurm's accounting" in stage.target().plan(more).sentences()


def test_images_of_the_file_are_imported_on_the_head_node(stage: Stage):
    text = MINIMAL.replace("us-east-1}", "us-east-1, key: k, allowed_ips: 203.0.113.0/24}")
    text += "containers: {enabled: true, folder: /home/images, images: [ubuntu]}\n"
    ssh = stage.root / "bin" / "ssh"
    ssh.write_text(FAKE_SSH)
    ssh.chmod(0o755)
    plan = stage.up(text)
    stage.target().import_images(plan, stage.said.append)
    (asked,) = (stage.root / "fake" / "ssh").read_text().splitlines()
    command = "sudo env DALSEGNO_IMAGES=/home/images /usr/local/bin/dalsegno image import --or-kept --quiet"
    assert asked.rpartition("198.51.100.7 ")[2].startswith(f"{command} ") and "importing" in stage.said[-1]
    assert stage.target().plan(cluster_of(text)).import_images == ()


def test_commands_about_runs_are_forwarded_to_the_head(stage: Stage):
    stage.up()
    assert is_elsewhere(stage.folder)
    assert isinstance(open_existing(stage.folder), PclusterTarget)
    assert isinstance(open_target("parallelcluster", stage.folder), PclusterTarget)


def test_no_file_of_the_folder_holds_a_secret_that_others_can_read(stage: Stage):
    stage.up(WALKTHROUGH.replace("ml-cluster", "demo"))
    for path in (each for each in stage.folder.rglob("*") if each.is_file()):
        if "PRIVATE KEY" in path.read_text():
            assert path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0, path
    assert not any(b"PRIVATE KEY" in body for body in stage.account.objects.values())


# The head node
OURS = "dalsegno:replace:gpu-lost[79] Xid 79"


@pytest.mark.parametrize(
    ("node", "call", "words"),
    [
        ("train-dy-train-1", "replace", f"update NodeName=train-dy-train-1 State=POWER_DOWN_FORCE Reason={OURS}"),
        ("train-st-train-1", "replace", f"update NodeName=train-st-train-1 State=DOWN Reason={OURS}"),
        ("train-st-train-1", "reboot", f"reboot ASAP nextstate=RESUME reason={OURS} train-st-train-1"),
    ],
)
def test_repairs_use_parallelclusters_reasons_and_keep_ours(tmp_path: Path, node: str, call: str, words: str):
    calls = repair(tmp_path, node, call, OURS)
    assert [" ".join(each[1:]) for each in calls if "show" not in each] == [words]


@pytest.mark.parametrize(
    "reason", ["(Code:InsufficientInstanceCapacity)Failure when resuming nodes", "ada looks at it"]
)
def test_node_with_a_reason_of_clustermgtd_or_of_a_person_is_left_alone(tmp_path: Path, reason: str):
    calls = [*repair(tmp_path, "train-st-train-1", "replace", reason),
             *repair(tmp_path, "train-dy-train-1", "reboot", reason)]  # fmt: skip
    assert len(calls) == 2 and all("show" in each for each in calls)


def repair(folder: Path, node: str, call: str, reason: str) -> list[tuple[str, ...]]:
    """Ask PclusterHead for a repair, and return the calls of scontrol."""
    shown = f"NodeName={node} State=DOWN CPUTot=8 RealMemory=1000 Partitions=train Reason={reason} [root@2026-11-18]\n"
    runner = FakeRunner(lambda argv, stdin: shown if "show" in argv else "")
    head = PclusterHead(folder, runner)
    getattr(head, call)(node)
    return runner.calls


def test_head_can_replace_and_reboot_but_not_change_the_cluster(stage: Stage):
    stage.up()
    state = read_state(stage.target().folder)
    assert state is not None
    head = stage.root / "head" / "clusters" / "demo"
    write_state(ClusterFolder(head), type(state)(**{**vars(state), "role": ClusterRole.HEAD}))
    target = open_existing(head)
    assert isinstance(target, PclusterHead) and isinstance(target, CanReplace) and isinstance(target, CanReboot)
    with pytest.raises(TargetError, match="created from another machine"):
        target.plan(cluster_of(MINIMAL))
    assert target.node_times.boot_s == 1800 and os.path.basename(target.folder.root) == "demo"
