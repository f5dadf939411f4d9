"""A HyperPod cluster from plan to removal, against AWS on loopback (see emulator.py)."""

from __future__ import annotations

import json

import pytest

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.targets.base import ClusterPhase
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal
from dalsegno.targets.hyperpod.folder import HyperPodStage, read_hyperpod_state
from tests.targets.hyperpod.conftest import CPU, GPU, cluster_of, one_api, open_hyperpod

SUBNETS = "  subnets: [subnet-0123456789abcdef0]\n  security_groups: [sg-0123456789abcdef0]\n"
LUSTRE = "storage: [{name: fsx, mount: /fsx, type: lustre, size: 1200G}]\n"


def call(service, operation, **parameters):
    return one_api("us-east-1").aws.call(service, operation, **parameters)


def up(target, cluster):
    said = []
    target.apply(target.plan(cluster), said.append)
    return said


def test_plan_of_a_new_cluster_names_resources_price_time_and_quotas(aws, tmp_path):
    plan = open_hyperpod(tmp_path).plan(cluster_of(CPU + GPU))
    text = "\n".join([*plan.sentences(), *plan.details()])
    assert "creates demo on hyperpod: 4 nodes (c5.4xlarge, g5.xlarge) in 2 partitions" in text
    assert "creates 4 instance groups (controller: 1 x ml.m5.2xlarge, login: 1 x ml.m5.xlarge, " in text
    assert "gpu: 2 x ml.g5.xlarge" in text
    assert "USD per hour" in text
    assert "takes about 15 to 30 minutes" in text
    assert "the service quota `ml.g5.xlarge for cluster usage`: at least 2" in text
    assert aws.sent("CreateCluster") == [], "a plan changes nothing"


@pytest.mark.parametrize(("settings", "is_on"), [("", True), ("  node_recovery: None\n", False)])
def test_plan_says_whether_hyperpods_own_recovery_is_on(aws, tmp_path, settings, is_on):
    said = open_hyperpod(tmp_path).plan(cluster_of(CPU, settings)).sentences()
    (line,) = [each for each in said if "own recovery" in each]
    recovery = "stays on" if is_on else "is off"
    restarts = "our runs restart by themselves, without `--auto-resume`"
    assert line == f"HyperPod's own recovery {recovery}: {restarts}"


def test_up_creates_bucket_scripts_and_cluster(aws, tmp_path):
    target, cluster = open_hyperpod(tmp_path), cluster_of()
    up(target, cluster)
    files = {each["Key"] for each in call("s3", "list_objects_v2", Bucket="sagemaker-demo-lifecycle")["Contents"]}
    assert {"demo/on_create.sh", "demo/roles.json", "demo/bootstrap-controller.sh", "demo/dalsegno.tar.gz"} <= files
    assert "demo/provisioning_parameters.json" not in files, "the request has it all: a file would be used instead"
    assert [len(each["InstanceGroups"]) for each in aws.sent("CreateCluster")] == [3]


def test_up_uploads_the_provisioning_parameters_of_the_older_generation_with_the_addresses_of_storage(aws, tmp_path):
    """They name the file system that `up` has created, whose address the plan does not know yet."""
    target = open_hyperpod(tmp_path)
    cluster = cluster_of(CPU + GPU, f"  configuration: provisioning\n{SUBNETS}", LUSTRE)
    up(target, cluster)
    key = "demo/provisioning_parameters.json"
    sent = call("s3", "get_object", Bucket="sagemaker-demo-lifecycle", Key=key)["Body"].read()
    parameters = json.loads(sent)
    assert parameters["controller_group"] == "controller" and parameters["login_group"] == "login"
    assert [each["partition_name"] for each in parameters["worker_groups"]] == ["cpu", "gpu"]
    (made,) = call("fsx", "describe_file_systems")["FileSystems"]
    assert parameters["fsx_dns_name"] == made["DNSName"]
    assert parameters["fsx_mountname"] == made["LustreConfiguration"]["MountName"]
    (request,) = aws.sent("CreateCluster")
    assert "SlurmConfig" not in json.dumps(request), "these clusters read the file"
    assert target.plan(cluster).empty


def test_progress_of_a_creation_is_followed_until_hyperpod_is_in_service(aws, tmp_path):
    aws.statuses += [{"ClusterStatus": "Creating"}, {"ClusterStatus": "Creating"}]
    said = up(open_hyperpod(tmp_path), cluster_of())
    assert any("the creation of demo" in line and "resources done" in line for line in said)


def test_failed_creation_shows_the_instance_and_is_created_again(aws, tmp_path):
    failed = {"ClusterStatus": "Failed", "FailureMessage": "Lifecycle scripts did not run successfully"}
    aws.statuses += [{"ClusterStatus": "Creating"}, failed]
    aws.instance_states["i-00000000000000000"] = ("Failure", "Lifecycle script execution failed on on_create.sh")
    target, cluster = open_hyperpod(tmp_path), cluster_of()
    with pytest.raises(TargetError, match=r"on_create\.sh") as caught:
        up(target, cluster)
    assert "operations" in caught.value.hint, "the events are kept"
    assert target.summary().phase is ClusterPhase.HALF_MADE
    aws.instance_states.clear()
    gone = {**failed, "InstanceGroups": []}
    aws.statuses += [gone]
    plan = target.plan(cluster)
    assert plan.sentences()[0] == "deletes demo, whose creation failed, and creates it again"
    target.apply(plan, lambda text: None)
    assert target.status().phase is ClusterPhase.UP


def test_interrupted_up_continues_with_the_operation_that_runs(aws, tmp_path):
    target, cluster = open_hyperpod(tmp_path), cluster_of()

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    target._pause = {"pause": interrupt}
    aws.statuses += [{"ClusterStatus": "Creating"}]
    with pytest.raises(KeyboardInterrupt):
        up(target, cluster)
    aws.statuses += [{"ClusterStatus": "Creating"}]
    again = open_hyperpod(tmp_path)
    plan = again.plan(cluster)
    assert plan.sentences()[:2] == [
        "finishes what an earlier `up` began",
        "follows HyperPod's Creating, which an earlier command started",
    ]
    again.apply(plan, lambda text: None)
    assert len(aws.sent("CreateCluster")) == 1
    assert again.plan(cluster).empty


def test_up_after_an_interrupted_down_waits_for_the_deletion_and_creates_the_cluster_again(aws, tmp_path):
    target, cluster = open_hyperpod(tmp_path), cluster_of()
    up(target, cluster)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    target._pause = {"pause": interrupt}
    aws.deletion_takes = 5
    with pytest.raises(KeyboardInterrupt):
        target.destroy(lambda text: None)
    again = open_hyperpod(tmp_path)
    plan = again.plan(cluster)
    assert plan.fresh and not plan.resumes and not plan.changes
    assert plan.sentences()[0] == "waits until HyperPod has deleted demo, and creates it again"
    again.apply(plan, lambda text: None)
    assert len(aws.sent("CreateCluster")) == 2 and len(aws.sent("DeleteCluster")) == 1
    assert again.status().phase is ClusterPhase.UP and again.plan(cluster).empty


def test_cluster_whose_deletion_ended_after_the_plan_is_created(aws, tmp_path):
    target, cluster = open_hyperpod(tmp_path), cluster_of()
    up(target, cluster)
    aws.deletion_takes = 1
    one_api("us-east-1").delete("demo")
    plan = target.plan(cluster)
    assert plan.deleting
    target.apply(plan, lambda text: None)
    assert len(aws.sent("CreateCluster")) == 2 and target.plan(cluster).empty


def test_added_gpu_partition_is_one_new_instance_group(aws, tmp_path):
    target = open_hyperpod(tmp_path)
    up(target, cluster_of(CPU))
    plan = target.plan(cluster_of(CPU + GPU))
    text = "\n".join(plan.sentences())
    assert "instance group gpu: none → 2 x ml.g5.xlarge; changes in place" in text
    assert "+" in text and "USD per hour" in text
    target.apply(plan, lambda text: None)
    (request,) = aws.sent("UpdateCluster")
    assert [each["InstanceGroupName"] for each in request["InstanceGroups"]] == ["gpu"]
    assert request["InstanceGroups"][0]["SlurmConfig"] == {"NodeType": "Compute", "PartitionNames": ["gpu"]}
    assert target.plan(cluster_of(CPU + GPU)).empty


def test_removed_partition_says_what_is_lost(aws, tmp_path):
    target = open_hyperpod(tmp_path)
    up(target, cluster_of(CPU + GPU))
    plan = target.plan(cluster_of(CPU))
    assert any("deletes data: ends the jobs on them" in line for line in plan.sentences())
    target.apply(plan, lambda text: None)
    assert aws.sent("UpdateCluster")[0]["InstanceGroupsToDelete"] == ["gpu"]


def test_other_instance_type_is_refused_with_the_way_around(aws, tmp_path):
    target = open_hyperpod(tmp_path)
    up(target, cluster_of(CPU))
    with pytest.raises(TargetError, match=r"cannot become ml\.c5\.9xlarge") as caught:
        target.plan(cluster_of(CPU.replace("4xlarge", "9xlarge")))
    assert "another name" in caught.value.hint


def test_resize_changes_one_group(aws, tmp_path):
    target = open_hyperpod(tmp_path)
    up(target, cluster_of(CPU))
    target.resize("cpu", 4)
    (request,) = aws.sent("UpdateCluster")
    assert [(each["InstanceGroupName"], each["InstanceCount"]) for each in request["InstanceGroups"]] == [("cpu", 4)]


def test_new_lustre_file_system_is_created_first_and_removed_last(aws, tmp_path):
    target, cluster = open_hyperpod(tmp_path), cluster_of(CPU, SUBNETS, LUSTRE)
    up(target, cluster)
    (made,) = call("fsx", "describe_file_systems")["FileSystems"]
    (request,) = aws.sent("CreateCluster")
    mounts = request["InstanceGroups"][0]["InstanceStorageConfigs"]
    assert mounts[0]["FsxLustreConfig"]["DnsName"] == made["DNSName"]
    assert mounts[0]["FsxLustreConfig"]["MountPath"] == "/fsx"
    assert target.removal().storage == ("fsx",), "`down` asks before it deletes data"
    assert target.removal().homes == ("ubuntu",), "they are on the disks of the instances"
    assert target.plan(cluster).empty
    assert target.destroy(lambda text: None)
    assert call("fsx", "describe_file_systems")["FileSystems"] == []


def test_script_must_say_yes_before_storage_in_a_cloud_is_deleted(aws, tmp_path, command, monkeypatch):
    up(open_hyperpod(tmp_path), cluster_of(CPU, SUBNETS, LUSTRE))
    monkeypatch.setenv("DALSEGNO_HOME", str(tmp_path))
    refused = command("down", "demo")
    assert refused.returncode == 2 and "add `--yes`" in refused.stderr
    assert call("fsx", "describe_file_systems")["FileSystems"] != []
    done = command("down", "demo", "--yes")
    assert done.returncode == 0 and "bucket sagemaker-demo-lifecycle is left" in done.stderr
    assert call("fsx", "describe_file_systems")["FileSystems"] == []


def test_cluster_of_others_with_the_same_name_is_left_alone(aws, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    up(open_hyperpod(tmp_path / "first"), cluster_of())
    with pytest.raises(TargetError, match="which this machine did not create"):
        open_hyperpod(tmp_path / "second").plan(cluster_of())


# Refusals


def test_missing_credentials_are_named_with_the_fix(aws, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(CloudError) as caught:
        open_hyperpod(tmp_path, fresh=True).plan(cluster_of())
    assert caught.value.refusal is CloudRefusal.NO_CREDENTIALS
    assert "aws sso login" in caught.value.hint


@pytest.mark.parametrize(
    ("code", "refusal"),
    [
        ("ExpiredTokenException", CloudRefusal.EXPIRED),
        ("AccessDeniedException", CloudRefusal.DENIED),
    ],
)
def test_refused_credentials_are_named_with_the_fix(aws, tmp_path, code, refusal):
    aws.refusals["ListClusters"] = [(400, code, "no")]
    with pytest.raises(CloudError) as caught:
        open_hyperpod(tmp_path).plan(cluster_of())
    assert caught.value.refusal is refusal
    assert caught.value.hint


def test_quota_refusal_keeps_the_half_made_cluster_and_up_continues(aws, tmp_path):
    text = "The account-level service limit 'ml.c5.4xlarge for cluster usage' is 0 Instances"
    aws.refusals["CreateCluster"] = [(400, "ResourceLimitExceeded", text)]
    target = open_hyperpod(tmp_path)
    with pytest.raises(CloudError, match="for cluster usage") as caught:
        up(target, cluster_of())
    assert caught.value.refusal is CloudRefusal.QUOTA
    state = read_hyperpod_state(target.folder)
    assert state is not None and state.phase is HyperPodStage.MAKING
    up(target, cluster_of())
    assert target.status().phase is ClusterPhase.UP


def test_wrong_value_is_refused_before_any_request_is_sent(aws, tmp_path):
    with pytest.raises(DalsegnoError, match=r"InstanceType cannot be `ml\.t2\.nano`"):
        open_hyperpod(tmp_path).plan(cluster_of(CPU.replace("ml.c5.4xlarge", "ml.t2.nano, cpus: 1, memory: 1G")))
    assert aws.sent("CreateCluster") == []
