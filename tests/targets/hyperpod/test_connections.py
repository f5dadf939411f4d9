"""Connections to the instances of a HyperPod cluster, and actions on the instances."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dalsegno.errors import NotThere, TargetError
from dalsegno.system.processes import Completed, FakeRunner
from dalsegno.targets.base import CanForward, CanReboot, CanReplace, CanResize, require
from dalsegno.targets.hyperpod.answers import InstanceInfo, InstanceStatus
from dalsegno.targets.hyperpod.connect import find_instance, name_instances, render_ssh_config, session_argv
from dalsegno.targets.hyperpod.folder import HyperPodFolder, read_hyperpod_state, write_hyperpod_state
from dalsegno.targets.hyperpod.head import HyperPodHead
from dalsegno.targets.hyperpod.workspace import write_permission
from dalsegno.targets.machines import CanExport, CanManageMachines, InstanceAction
from tests.targets.hyperpod.conftest import CPU, cluster_of, open_hyperpod
from tests.targets.hyperpod.test_lifecycle_of_cluster import up
from tests.targets.hyperpod.test_scripts import WRITE

INSTANCES = [
    InstanceInfo("controller", "i-0c", "ml.m5.2xlarge", InstanceStatus.RUNNING, host="ip-10-0-0-1"),
    InstanceInfo("cpu", "i-01", "ml.c5.4xlarge", InstanceStatus.RUNNING, host="ip-10-0-0-2"),
    InstanceInfo("cpu", "i-02", "ml.c5.4xlarge", InstanceStatus.RUNNING, host="ip-10-0-0-3"),
]


def test_instance_is_found_by_its_short_name_its_name_in_slurm_and_its_id():
    reached = name_instances(INSTANCES, "controller")
    assert [each.names[0] for each in reached] == ["head", "cpu-1", "cpu-2"]
    assert {find_instance(reached, name).instance.id for name in ("cpu-2", "ip-10-0-0-3", "i-02")} == {"i-02"}
    with pytest.raises(NotThere, match="there is no instance `cpu-3`"):
        find_instance(reached, "cpu-3")


def test_ssm_session_names_cluster_group_and_instance():
    assert session_argv("us-east-1", "abcdefghijkl", INSTANCES[1]) == [
        "aws", "ssm", "start-session", "--region", "us-east-1",
        "--target", "sagemaker-cluster:abcdefghijkl_cpu-i-01",
    ]  # fmt: skip
    command = session_argv("us-east-1", "abcdefghijkl", INSTANCES[1], ["echo", "a b"])
    assert json.loads(command[-1]) == {"command": ["echo 'a b'"]}


def test_ssh_reads_the_written_settings(tmp_path):
    folder = HyperPodFolder(tmp_path / "a 100% folder")
    folder.root.mkdir()
    reached = name_instances(INSTANCES, "controller")
    text = render_ssh_config("us-east-1", "demo", "abcdefghijkl", reached, "/home/me/.ssh/key.pub", folder)
    folder.ssh_config.write_text(text)
    for name in ("demo-head", "demo-ip-10-0-0-1", "demo-i-0c"):
        argv = ["ssh", "-G", "-F", str(folder.ssh_config), name]
        found = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        assert "user ubuntu" in found
        assert "identityfile /home/me/.ssh/key\n" in found
        assert "--target sagemaker-cluster:abcdefghijkl_controller-i-0c" in found
        assert "--document-name AWS-StartSSHSession --parameters portNumber=%p" in found


def key_file(folder: Path) -> str:
    file = folder / "key.pub"
    file.write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ me\n")
    return f"  ssh_key: {file}\n"


def test_shell_and_forwarded_commands_use_ssh_through_ssm(aws, tmp_path):
    target = open_hyperpod(tmp_path)
    up(target, cluster_of(CPU, key_file(tmp_path)))
    entry = target.shell([], {}, "/")
    assert entry.argv[-1] == "demo-login-1", "people work on the login node"
    assert target.shell([], {}, "/", host="cpu-1").argv[-1] == "demo-cpu-1"
    forwarded = target.forward(["run", "train.py"])
    assert forwarded is not None and forwarded.argv[-2:] == ["demo-head", "/usr/local/bin/dalsegno run train.py"]
    assert target.forward(["nodes"]) is None and target.forward(["monitor", "up"]) is None


def test_without_a_key_shells_are_ssm_sessions_and_status_says_what_is_missing(aws, tmp_path):
    target = open_hyperpod(tmp_path)
    up(target, cluster_of())
    assert target.shell([], {}, "/", host="cpu-1").argv[:3] == ["aws", "ssm", "start-session"]
    (problem,) = target.status().problems
    assert "ssh_key" in problem


def test_repairs_use_exactly_the_reasons_that_hyperpod_waits_for(aws, tmp_path):
    runner = FakeRunner(lambda argv, stdin: "")
    target = open_hyperpod(tmp_path, runner)
    up(target, cluster_of(CPU, key_file(tmp_path)))
    host = next(each.node for each in target.machines() if each.name == "cpu-1")
    target.replace("cpu-1")
    target.reboot("cpu-1")
    words = [call[-1] for call in runner.calls if "scontrol update" in call[-1]]
    assert [each.partition("scontrol ")[2] for each in words] == [
        f"update NodeName={host} State=FAIL Reason=Action:Replace",
        f"update NodeName={host} State=FAIL Reason=Action:Reboot",
    ]
    assert aws.sent("BatchReplaceClusterNodes") == []


def test_head_repairs_nodes_with_the_same_reasons(tmp_path):
    runner = FakeRunner(lambda argv, stdin: "")
    head = HyperPodHead(tmp_path / "demo", runner)
    head.replace("ip-10-0-0-2")
    assert runner.calls[-1] == ("scontrol", "update", "NodeName=ip-10-0-0-2", "State=FAIL", "Reason=Action:Replace")
    with pytest.raises(TargetError, match="was created from another machine"):
        head.plan(cluster_of())


def test_batch_api_is_the_alternative_and_its_failures_are_reported(aws, tmp_path):
    target = open_hyperpod(tmp_path)
    up(target, cluster_of())
    ids = {each.name: each.id for each in target.machines()}
    target.act_on_machines(InstanceAction.REPLACE, ["cpu-1", "cpu-2"], through_api=True)
    (request,) = aws.sent("BatchReplaceClusterNodes")
    assert request["NodeIds"] == [ids["cpu-1"], ids["cpu-2"]]
    aws.failed_nodes[ids["cpu-2"]] = "InstanceIdInUse"
    with pytest.raises(TargetError, match=f"did not reboot {ids['cpu-2']}: InstanceIdInUse"):
        target.act_on_machines(InstanceAction.REBOOT, ["cpu-1", "cpu-2"], through_api=True)
    with pytest.raises(TargetError, match="does not replace the controller"):
        target.act_on_machines(InstanceAction.REPLACE, ["head"], through_api=True)


def test_missing_partition_and_failed_instance_are_problems_of_the_status(aws, tmp_path):
    def slurm(argv, stdin):
        text = " ".join(argv)
        if "show part" in text:
            return "PartitionName=dev Nodes=ip-10-3-0-1 State=UP\n"
        return "No nodes in the system\n" if "show node" in text else ""

    target = open_hyperpod(tmp_path, FakeRunner(slurm))
    up(target, cluster_of(CPU, key_file(tmp_path)))
    aws.instance_states["i-00000000000000002"] = ("Failure", "GPU fell off")
    problems = target.status().problems
    assert any("partition cpu is missing in Slurm" in each for each in problems)
    assert any("(i-00000000000000002) failed: GPU fell off" in each for each in problems)


def test_monitor_up_puts_exporters_on_every_instance(aws, tmp_path):
    runner = FakeRunner(lambda argv, stdin: Completed(tuple(argv), 0, ""))
    target = open_hyperpod(tmp_path, runner)
    cluster = cluster_of(CPU, key_file(tmp_path), WRITE)
    up(target, cluster)
    plan = target.switch_exporters(True, lambda text: None)
    assert any("uploads 3 files" in line for line in plan.sentences())
    target.apply(plan, lambda text: None)
    refreshed = [call for call in runner.calls if call[-1] == "sudo dalsegno-refresh"]
    assert len(refreshed) == 4, "controller, login node and two workers"
    assert target.plan(cluster).empty, "the next `up` does not remove them"


def test_monitor_up_creates_one_workspace_and_grafana_reads_it(aws, tmp_path, command, monkeypatch):
    monkeypatch.setenv("DALSEGNO_HOME", str(tmp_path))
    target = open_hyperpod(tmp_path)
    up(target, cluster_of())
    said: list[str] = []
    assert target.metrics_workspace() is None
    target.apply(target.switch_exporters(True, said.append), said.append)
    assert said[0] == "creating the workspace dalsegno-demo of Amazon Managed Service for Prometheus"
    found = target.metrics_workspace()
    assert found is not None and found.url.endswith("/api/v1/remote_write") and found.region == "us-east-1"
    again: list[str] = []
    write_hyperpod_state(target.folder, replace(read_hyperpod_state(target.folder), workspace=""))
    target.switch_exporters(True, again.append)
    assert again == [] and target.metrics_workspace() == found, "a workspace of an earlier call is used again"
    assert target.plan(cluster_of()).empty, "the scripts name the workspace, and the next `up` keeps it"
    done = command("dashboards", "export", tmp_path / "grafana", "--cluster", "demo")
    assert done.returncode == 0, done.stderr
    source = yaml.safe_load((tmp_path / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][
        0
    ]
    assert source["url"] == found.url.removesuffix("/api/v1/remote_write")
    assert source["jsonData"]["sigV4Auth"] and source["jsonData"]["sigV4Region"] == "us-east-1"


def test_abilities_of_the_target(tmp_path):
    target = open_hyperpod(tmp_path)
    for ability in (CanReplace, CanReboot, CanResize, CanForward):
        assert require(target, ability) is target
    assert isinstance(target, CanManageMachines) and isinstance(target, CanExport)


# Commands


def test_ls_status_and_nodes_are_the_command_line_of_hyperpod(aws, tmp_path, command, monkeypatch):
    up(open_hyperpod(tmp_path), cluster_of())
    monkeypatch.setenv("DALSEGNO_HOME", str(tmp_path))
    assert "hyperpod" in command("ls").stdout
    nodes = json.loads(command("nodes", "--json").stdout)
    assert [each["name"] for each in nodes] == ["head", "cpu-1", "cpu-2", "login-1"]
    status = json.loads(command("status", "--json").stdout)
    assert (status["phase"], status["facts"]["HyperPod"]) == ("up", "InService")
    done = command("nodes", "replace", "cpu-1", "--api")
    assert done.returncode == 0, done.stderr
    assert len(aws.sent("BatchReplaceClusterNodes")) == 1
    refused = command("nodes", "replace", "cpu-9", "--api")
    assert refused.returncode == 1 and "there is no instance `cpu-9`" in refused.stderr


def test_permission_to_write_metrics_is_a_command_for_the_role_of_the_instances():
    role = "arn:aws-cn:iam::123456789012:role/service-role/demo-hyperpod"
    assert write_permission(role) == (
        "aws iam attach-role-policy --role-name demo-hyperpod "
        "--policy-arn arn:aws-cn:iam::aws:policy/AmazonPrometheusRemoteWriteAccess"
    )
