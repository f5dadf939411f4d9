"""Changes of a running HyperPod cluster: each field of the file is changed, refused with what to do, or mounted."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("botocore")

from dalsegno.errors import TargetError
from dalsegno.system.processes import Completed, FakeRunner
from dalsegno.targets.cloud.aws import FakeAws
from dalsegno.targets.cloud.credentials import CloudError, explain, refusal_of_code
from dalsegno.targets.hyperpod.answers import SharedFileSystem, read_cluster
from dalsegno.targets.hyperpod.api import HyperPodApi
from dalsegno.targets.hyperpod.apply import HyperPodWork
from dalsegno.targets.hyperpod.changes import TagChange, compare_tags
from dalsegno.targets.hyperpod.folder import HyperPodFolder
from dalsegno.targets.hyperpod.requests import create_request
from tests.targets.hyperpod.conftest import CPU, GPU, SPEC, cluster_of, one_api, open_hyperpod

NETWORK = "  subnets: [subnet-0123456789abcdef0]\n  security_groups: [sg-0123456789abcdef0]\n"
LUSTRE = "storage: [{name: fsx, mount: /fsx, type: lustre, size: 1200G}]\n"
PLAN = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/p5"


def up(target, cluster) -> None:
    target.apply(target.plan(cluster), lambda text: None)


def group(text: str) -> str:
    return f"  groups: {{cpu: {{{text}}}}}\n"


@pytest.mark.parametrize(
    ("before", "after", "sentence", "sent"),
    [
        (
            "",
            group(f"training_plan: '{PLAN}'"),
            f"instance group cpu: training plan: none → {PLAN}; changes in place",
            lambda request: request["InstanceGroups"][0]["TrainingPlanArn"] == PLAN,
        ),
        (
            group(f"training_plan: '{PLAN}'"),
            "",
            f"instance group cpu: training plan: {PLAN} → none; changes in place",
            lambda request: "TrainingPlanArn" not in request["InstanceGroups"][0],
        ),
        (
            "",
            "  node_recovery: None\n",
            "NodeRecovery: Automatic → None; changes in place",
            lambda request: request["NodeRecovery"] == "None",
        ),
        (
            "",
            "  config_strategy: Merge\n",
            "SlurmConfigStrategy: Managed → Merge; changes in place",
            lambda request: request["Orchestrator"] == {"Slurm": {"SlurmConfigStrategy": "Merge"}},
        ),
    ],
    ids=("plan", "no-plan", "recovery", "strategy"),
)
def test_setting_that_the_api_changes_is_changed(aws, tmp_path, before, after, sentence, sent):
    target = open_hyperpod(tmp_path)
    up(target, cluster_of(CPU, before))
    plan = target.plan(cluster_of(CPU, after))
    assert sentence in plan.sentences()
    target.apply(plan, lambda text: None)
    (request,) = aws.sent("UpdateCluster")
    assert sent(request)
    assert [each["InstanceGroupName"] for each in request.get("InstanceGroups", ())] in ([], ["cpu"])
    assert target.plan(cluster_of(CPU, after)).empty


@pytest.mark.parametrize(
    ("before", "after", "problem", "instead"),
    [
        ("", "  volume: 500G\n", "instance group controller: volume: none cannot become 500 GiB", "dalsegno down"),
        ("  volume: 500G\n", "  volume: 600G\n", "volume: 500 GiB cannot become 600 GiB", "dalsegno down"),
        (
            "",
            group("threads_per_core: 2"),
            "instance group cpu: threads per core: 1 cannot become 2",
            "another name",
        ),
        (
            NETWORK,
            NETWORK + group("subnets: [subnet-0123456789abcdef1]"),
            "instance group cpu: subnets: none cannot become subnet-0123456789abcdef1",
            "another name",
        ),
        ("", NETWORK, "subnets: none cannot become subnet-0123456789abcdef0", "dalsegno down"),
        (
            NETWORK,
            NETWORK.replace("sg-0123456789abcdef0", "sg-0123456789abcdef1"),
            "security groups: sg-0123456789abcdef0 cannot become sg-0123456789abcdef1",
            "dalsegno down",
        ),
        ("", "  configuration: provisioning\n", "lifecycle script: OnInitComplete cannot become OnCreate", "down"),
    ],
)
def test_setting_that_is_fixed_is_refused_with_what_to_do(aws, tmp_path, before, after, problem, instead):
    target = open_hyperpod(tmp_path)
    up(target, cluster_of(CPU, before))
    with pytest.raises(TargetError) as caught:
        target.plan(cluster_of(CPU, after))
    assert problem in caught.value.what
    assert instead in caught.value.hint
    assert aws.sent("UpdateCluster") == []


def test_other_execution_role_is_refused(aws, tmp_path):
    from dalsegno.spec.load import parse_spec
    from dalsegno.spec.resolve import resolve

    target = open_hyperpod(tmp_path)
    up(target, cluster_of())
    text = SPEC.format(partitions=CPU, settings="", rest="").replace("role/demo-hyperpod", "role/other-hyperpod")
    with pytest.raises(TargetError, match=r"execution role: \S+/demo-hyperpod cannot become \S+/other-hyperpod"):
        target.plan(resolve(parse_spec(text, "cluster.yaml")))


def test_description_of_a_cluster_has_every_setting_of_its_request():
    settings = NETWORK + "  volume: 500G\n" + group(f"threads_per_core: 2, training_plan: '{PLAN}'")
    shared = SharedFileSystem("fs-0123456789abcdef0.fsx.us-east-1.amazonaws.com", "/fsx", "abcdefgh")
    request = create_request(cluster_of(CPU, settings), [shared])
    found = read_cluster(request).groups[-1]
    assert (found.threads_per_core, found.volume_gib, found.training_plan) == (2, 500, PLAN)
    assert (found.mounts, found.entry, found.execution_role[-13:]) == ((shared,), "OnInitComplete", "demo-hyperpod")


# Tags


def test_tags_are_added_changed_and_removed(aws, tmp_path):
    target = open_hyperpod(tmp_path)
    up(target, cluster_of(CPU, "  tags: {team: research, cost: a}\n"))
    aws.tags["owner"] = "somebody else"
    changed = cluster_of(CPU, "  tags: {team: search, site: berlin}\n")
    plan = target.plan(changed)
    assert {"tag team: research → search; changes in place", "tag cost: a → none; changes in place"} <= {
        *plan.sentences()
    }
    target.apply(plan, lambda text: None)
    assert aws.tags == {"dalsegno-cluster": "demo", "team": "search", "site": "berlin", "owner": "somebody else"}
    assert aws.sent("UpdateCluster") == []
    assert target.plan(changed).empty


def test_tags_that_may_not_be_read_are_not_compared(aws, tmp_path):
    target = open_hyperpod(tmp_path)
    up(target, cluster_of())
    aws.refusals["ListTags"] = [(400, "AccessDeniedException", "no")]
    assert target.plan(cluster_of(CPU, "  tags: {team: search}\n")).changes == ()


def test_only_tags_of_the_last_up_are_removed():
    before, now = cluster_of(CPU, "  tags: {team: research}\n"), cluster_of()
    present = {"dalsegno-cluster": "demo", "team": "research", "owner": "them"}
    assert compare_tags(now, before, present) == TagChange({}, ("team",), present)
    assert compare_tags(now, None, present) == TagChange({}, (), present)


# Storage


def test_lustre_added_to_a_running_cluster_is_mounted_by_the_lifecycle_script(aws, tmp_path):
    key = tmp_path / "key.pub"
    key.write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ me\n")
    settings = f"{NETWORK}  ssh_key: {key}\n"
    runner = FakeRunner(lambda argv, stdin: "")
    target = open_hyperpod(tmp_path, runner)
    up(target, cluster_of(CPU, settings))
    plan = target.plan(cluster_of(CPU, settings, LUSTRE))
    text = "\n".join(plan.sentences())
    assert "creates 1 FSx for Lustre file system (fsx)" in text and "instance group" not in text
    assert "(+0.35 USD per hour)" in text and "runs them on all instances" in text
    runner.calls.clear()
    target.apply(plan, lambda text: None)
    script = (target.folder.scripts / "on_create.sh").read_text()
    assert "\nmount_shared lustre fs-" in script and " /fsx noatime" in script
    refreshed = [call for call in runner.calls if "dalsegno-refresh" in call[-1]]
    assert len(refreshed) == 4, "every running instance runs the new script"
    assert aws.sent("UpdateCluster") == []
    assert target.plan(cluster_of(CPU, settings, LUSTRE)).empty
    up(target, cluster_of(CPU.replace("nodes: 2", "nodes: 3") + GPU, settings, LUSTRE))
    (request,) = aws.sent("UpdateCluster")
    storage = {each["InstanceGroupName"]: each.get("InstanceStorageConfigs") for each in request["InstanceGroups"]}
    assert storage["cpu"] is None, "the file systems in the request of a group are fixed"
    assert storage["gpu"][0]["FsxLustreConfig"]["MountPath"] == "/fsx"


def test_file_system_that_left_the_file_is_named_because_it_costs(aws, tmp_path):
    target = open_hyperpod(tmp_path)
    up(target, cluster_of(CPU, NETWORK, LUSTRE))
    plan = target.plan(cluster_of(CPU, NETWORK))
    assert "keeps and pays 1 file system (fsx), which left the file, until `dalsegno down` deletes it" in (
        plan.sentences()
    )
    up(target, cluster_of(CPU, NETWORK))
    assert one_api("us-east-1").aws.call("fsx", "describe_file_systems")["FileSystems"] != []
    assert target.removal().storage == ("fsx",)


# Logs of a failed creation


def test_failed_creation_keeps_the_logs_of_the_lifecycle_scripts(aws, tmp_path):
    logs, now = one_api("us-east-1").aws, int(time.time() * 1000)  # CloudWatch refuses old events
    name = "/aws/sagemaker/Clusters/demo/abcdefghijkl"
    logs.call("logs", "create_log_group", logGroupName=name)
    for stream, message in (("LifecycleConfig/cpu/i-1", "fine"), ("LifecycleConfig/controller/i-2", "no disk space")):
        logs.call("logs", "create_log_stream", logGroupName=name, logStreamName=stream)
        events = [{"timestamp": now, "message": "dalsegno: role"}, {"timestamp": now + 1, "message": message}]
        logs.call("logs", "put_log_events", logGroupName=name, logStreamName=stream, logEvents=events)
    aws.statuses += [{"ClusterStatus": "Creating"}, {"ClusterStatus": "Failed", "FailureMessage": "scripts failed"}]
    target = open_hyperpod(tmp_path)
    with pytest.raises(TargetError, match="scripts failed"):
        up(target, cluster_of())
    kept = {path.name: path.read_text() for path in target.folder.operation_logs.glob("*.log")}
    assert kept == {
        "LifecycleConfig-cpu-i-1.log": "dalsegno: role\nfine\n",
        "LifecycleConfig-controller-i-2.log": "dalsegno: role\nno disk space\n",
    }
    assert {path.stat().st_mode & 0o777 for path in target.folder.operation_logs.iterdir()} == {0o600}


@pytest.mark.parametrize(
    ("refusal", "message"),
    [("ResourceNotFoundException", []), ("AccessDeniedException", ["the logs of the lifecycle scripts are only in "])],
)
def test_logs_that_cannot_be_read_hide_no_failure(tmp_path, refusal, message):
    def answer(service, operation, request):
        if service == "logs":
            raise explain(refusal_of_code(refusal), f"{service} {operation}", "no", refusal)
        if operation == "list_clusters":
            return {"ClusterSummaries": [{"ClusterName": "demo"}]}
        return {"ClusterName": "demo", "ClusterStatus": "Failed", "FailureMessage": "scripts failed"}

    said: list[str] = []
    work = HyperPodWork(HyperPodApi(FakeAws(answer)), HyperPodFolder(tmp_path), said.append)
    with pytest.raises(CloudError, match="scripts failed"):
        work._follow("demo", "the creation of demo")
    assert [line[:46] for line in said] == [each[:46] for each in message]


def test_scripts_that_did_not_run_on_all_instances_are_run_by_the_next_up(aws, tmp_path):
    key = tmp_path / "key.pub"
    key.write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ me\n")
    settings, broken = f"{NETWORK}  ssh_key: {key}\n", ["cpu-2"]

    def answer(argv, stdin):
        return Completed(argv, 255, "", "connection lost") if any(name in " ".join(argv) for name in broken) else ""

    runner = FakeRunner(answer)
    target = open_hyperpod(tmp_path, runner)
    up(target, cluster_of(CPU, settings))
    with pytest.raises(TargetError):
        up(target, cluster_of(CPU, settings, LUSTRE))
    plan = open_hyperpod(tmp_path).plan(cluster_of(CPU, settings, LUSTRE))
    assert "runs the newest lifecycle scripts on all instances" in plan.sentences()[-1]
    broken.clear()
    runner.calls.clear()
    up(open_hyperpod(tmp_path, runner), cluster_of(CPU, settings, LUSTRE))
    assert len([call for call in runner.calls if "dalsegno-refresh" in call[-1]]) == 4
    assert target.plan(cluster_of(CPU, settings, LUSTRE)).empty
