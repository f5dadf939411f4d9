"""The machine with Grafana: its template passes CloudFormation's linter, and moto creates, changes and deletes it."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dalsegno.errors import TargetError
from dalsegno.observe.grafana import VERSION
from dalsegno.spec.facts import RemoteWrite
from dalsegno.targets.cloud.aws import FakeAws
from dalsegno.targets.cloud.cost import PriceTable
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal, explain
from dalsegno.targets.hyperpod.api import HyperPodApi
from dalsegno.targets.hyperpod.folder import read_hyperpod_state
from dalsegno.targets.hyperpod.grafana import (
    MOST_USER_DATA,
    connect_command,
    grafana_template,
    price_text,
    start_script,
)
from dalsegno.targets.hyperpod.grafana_stack import GrafanaStack
from dalsegno.targets.hyperpod.target import HyperPodTarget
from tests.targets.cloud_tools import python_of
from tests.targets.hyperpod.conftest import CPU, cluster_of, one_api, open_hyperpod
from tests.targets.hyperpod.test_lifecycle_of_cluster import up

WORKSPACE = RemoteWrite(
    "https://aps-workspaces.us-east-1.amazonaws.com/workspaces/ws-1/api/v1/remote_write", "us-east-1"
)
NETWORK = "  subnets: [subnet-0123456789abcdef0]\n  security_groups: [sg-0123456789abcdef0]\n"


def template_of(settings: str = NETWORK) -> dict[str, Any]:
    return grafana_template(cluster_of(CPU, settings), WORKSPACE)


def machine_of(template: dict[str, Any]) -> str:
    return next(name for name, each in template["Resources"].items() if each["Type"] == "AWS::EC2::Instance")


def test_template_passes_cloudformations_linter(tmp_path: Path):
    file = tmp_path / "grafana.json"
    file.write_text(json.dumps(template_of()))
    lint = python_of("tools").with_name("cfn-lint")
    done = subprocess.run([lint, "--regions", "us-east-1", "--", file], capture_output=True, text=True, timeout=170)
    assert (done.returncode, done.stdout) == (0, "")


def test_script_is_clean_and_fits_into_the_user_data(tmp_path: Path):
    script = start_script("demo", WORKSPACE)
    assert len(script.encode()) < MOST_USER_DATA
    (tmp_path / "start.sh").write_text(script)
    program = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([program, tmp_path / "start.sh"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_script_installs_grafana_before_it_writes_its_files_and_starts_it_last(tmp_path: Path):
    """bash runs the script below a folder. Stand-ins for dnf and systemctl record their calls and the files."""
    root, programs = tmp_path / "root", tmp_path / "bin"
    for folder in (root / "etc/yum.repos.d", root / "etc/sysconfig", programs):
        folder.mkdir(parents=True)
    for name in ("dnf", "systemctl"):
        lines = f'#!/bin/sh\necho "{name} $*; $(find {root} -type f | wc -l) files" >> {tmp_path}/calls\n'
        (programs / name).write_text(lines)
        (programs / name).chmod(0o755)
    script = start_script("demo", WORKSPACE).replace(" /etc/", f" {root}/etc/").replace("-C /\n", f"-C {root}\n")
    done = subprocess.run(
        ["bash"], input=script, text=True, capture_output=True, env={"PATH": f"{programs}:/usr/bin:/bin"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    install, start = (tmp_path / "calls").read_text().splitlines()
    assert install == f"dnf install -y grafana-{VERSION}; 1 files"
    assert start == "systemctl enable --now grafana-server; 10 files"
    assert (root / "etc/grafana/provisioning/datasources/prometheus.yml").stat().st_mode & 0o777 == 0o644


def test_script_unpacks_the_dashboards_and_a_data_source_that_signs_its_requests():
    packed = (
        start_script("demo", WORKSPACE).partition("base64 -d <<'END'")[2].partition("\n")[2].partition("\nEND\n")[0]
    )
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as archive:
        files = {name: archive.extractfile(name).read().decode() for name in archive.getnames()}  # type: ignore[union-attr]
    source = yaml.safe_load(files["etc/grafana/provisioning/datasources/prometheus.yml"])["datasources"][0]
    assert source["url"] == WORKSPACE.url.removesuffix("/api/v1/remote_write")
    assert source["jsonData"]["sigV4Auth"] and source["jsonData"]["sigV4Region"] == "us-east-1"
    provider = yaml.safe_load(files["etc/grafana/provisioning/dashboards/dalsegno.yml"])["providers"][0]
    dashboards = [name for name in files if name.startswith(provider["options"]["path"].lstrip("/"))]
    assert len(dashboards) == 6 and all(json.loads(files[name]) for name in dashboards)


def test_nobody_reaches_grafana_but_through_a_session_and_the_role_reads_one_workspace():
    template = template_of()
    settings = set(start_script("demo", WORKSPACE).splitlines())
    assert "GF_SERVER_HTTP_ADDR=127.0.0.1" in settings
    closed = {"GF_AUTH_DISABLE_LOGIN_FORM=true", "GF_AUTH_BASIC_ENABLED=false"}
    assert settings > {*closed, "GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION=true"}, "admin/admin opens nothing"
    assert not [each for each in template["Resources"].values() if each["Type"] == "AWS::EC2::SecurityGroup"]
    (policy,) = template["Resources"]["Role"]["Properties"]["Policies"]
    (statement,) = policy["PolicyDocument"]["Statement"]
    assert statement["Resource"]["Fn::Sub"].endswith(":workspace/ws-1")
    assert connect_command("us-east-1", "i-1") == (
        "aws ssm start-session --region us-east-1 --target i-1 --document-name AWS-StartPortForwardingSession "
        "--parameters portNumber=3000,localPortNumber=3000"
    )


def test_machine_is_replaced_only_if_its_script_changes():
    other = grafana_template(cluster_of(CPU, NETWORK), replace(WORKSPACE, url=WORKSPACE.url.replace("ws-1", "ws-2")))
    assert machine_of(template_of()) == machine_of(template_of(f"{NETWORK}  tags: {{team: ml}}\n"))
    assert machine_of(template_of()) != machine_of(other)


def test_cluster_without_a_network_or_a_workspace_has_no_grafana(aws, tmp_path: Path):
    with pytest.raises(TargetError, match="needs the cluster's network"):
        template_of("")
    target = open_hyperpod(tmp_path)
    up(target, cluster_of())
    with pytest.raises(TargetError, match="there is no workspace") as raised:
        target.start_grafana(print)
    assert "`dalsegno monitor up`" in raised.value.hint


def network() -> str:
    """Create a network in moto, and return the settings that name it."""
    ec2 = one_api("us-east-1").aws
    vpc = ec2.call("ec2", "create_vpc", CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.call("ec2", "create_subnet", VpcId=vpc, CidrBlock="10.9.1.0/24")["Subnet"]["SubnetId"]
    group = ec2.call("ec2", "create_security_group", VpcId=vpc, GroupName="g", Description="d")["GroupId"]
    return f"  subnets: [{subnet}]\n  security_groups: [{group}]\n"


def machines() -> list[str]:
    found = one_api("us-east-1").aws.call("ec2", "describe_instances")["Reservations"]
    live = [each for one in found for each in one["Instances"] if each["State"]["Name"] == "running"]
    return [each["InstanceId"] for each in live if {"Key": "dalsegno:cluster", "Value": "demo"} in each["Tags"]]


def test_machine_is_created_once_found_again_and_deleted_with_the_cluster(aws, tmp_path: Path, command, monkeypatch):
    monkeypatch.setenv("DALSEGNO_HOME", str(tmp_path))
    target = open_hyperpod(tmp_path)
    up(target, cluster_of(CPU, network()))
    said: list[str] = []
    target.apply(target.switch_exporters(True, said.append), said.append)
    done = command("dashboards", "deploy", "--cluster", "demo")
    assert done.returncode == 0, done.stderr
    (machine,) = machines()
    assert "creating a t3.small for Grafana, about 0.02 USD per hour" in done.stderr
    assert f"--target {machine} " in done.stderr and "127.0.0.1:3000" in done.stderr
    assert target.start_grafana(said.append) == connect_command("us-east-1", machine) and machines() == [machine]
    state = read_hyperpod_state(target.folder)
    assert state is not None and state.grafana
    assert command("dashboards", "remove", "--cluster", "demo").returncode == 0
    assert machines() == [] and not target.stop_grafana(said.append)
    target.start_grafana(said.append)
    assert len(machines()) == 1
    target.destroy(said.append)
    assert machines() == []


def test_failed_stack_names_the_resource_and_the_command_to_repeat(tmp_path: Path):
    events = [
        {"EventId": "2", "LogicalResourceId": "Profile", "ResourceType": "AWS::IAM::InstanceProfile",
         "ResourceStatus": "CREATE_FAILED", "ResourceStatusReason": "Resource creation cancelled"},
        {"EventId": "1", "LogicalResourceId": "Role", "ResourceType": "AWS::IAM::Role",
         "ResourceStatus": "CREATE_FAILED", "ResourceStatusReason": "not authorized to perform: iam:CreateRole"},
    ]  # fmt: skip
    created: list[str] = []

    def answer(service: str, operation: str, parameters: object) -> dict[str, Any]:
        if operation == "create_stack":
            created.append("stack")
        if operation == "describe_stacks":
            return {"Stacks": [{"StackStatus": "CREATE_FAILED"}] if created else []}
        return {"StackEvents": events}

    stack = GrafanaStack(FakeAws(answer), "dalsegno-demo-grafana", tmp_path, lambda text: None, lambda seconds: None)
    with pytest.raises(CloudError, match=r"Role \(AWS::IAM::Role\): not authorized") as raised:
        stack.put(template_of(), lambda: None)
    assert "`dalsegno dashboards deploy` again" in raised.value.hint
    assert "cancelled" in (tmp_path / "events.jsonl").read_text()


NAME = "dalsegno-demo-grafana"


def stack_of(aws: FakeAws, logs: Path, said: list[str]) -> GrafanaStack:
    return GrafanaStack(aws, NAME, logs, said.append, lambda seconds: None)


def event(id: int, name: str, kind: str, status: str, reason: str) -> dict[str, Any]:
    return {"EventId": str(id), "LogicalResourceId": name, "ResourceType": f"AWS::{kind}",
            "ResourceStatus": status, "ResourceStatusReason": reason}  # fmt: skip


def test_failed_update_names_its_own_failure_and_shows_its_progress(tmp_path: Path):
    """A stack keeps the events of all its operations."""
    events = [
        event(1, NAME, "CloudFormation::Stack", "UPDATE_IN_PROGRESS", "User Initiated"),
        event(2, "GrafanaOld", "EC2::Instance", "CREATE_FAILED", "the old failure"),
        event(3, NAME, "CloudFormation::Stack", "UPDATE_IN_PROGRESS", "User Initiated"),
        event(4, "GrafanaNew", "EC2::Instance", "CREATE_IN_PROGRESS", ""),
    ]
    running: list[str] = []

    def answer(service: str, operation: str, parameters: object) -> dict[str, Any]:
        if operation == "update_stack":
            running.append("UPDATE_IN_PROGRESS")
        if operation == "describe_stacks":
            return {"Stacks": [{"StackStatus": running.pop() if running else "UPDATE_ROLLBACK_COMPLETE"}]}
        shown = events[::-1]
        if operation == "describe_stack_events" and len(events) == 4:
            events.append(event(5, "GrafanaNew", "EC2::Instance", "CREATE_FAILED", "the new failure"))
        return {"StackEvents": shown}

    said: list[str] = []
    stack = stack_of(FakeAws(answer), tmp_path, said)
    with pytest.raises(CloudError, match=r"GrafanaNew \(AWS::EC2::Instance\): the new failure") as raised:
        stack.put(template_of(), lambda: None)
    assert "old failure" not in f"{raised.value}{said}"
    assert said[0] == f"stack {NAME}: 0 resources done, now GrafanaNew (AWS::EC2::Instance)"


@pytest.mark.parametrize("status", ["ROLLBACK_COMPLETE", "UPDATE_ROLLBACK_FAILED"])
def test_stack_that_cannot_be_updated_is_created_again(tmp_path: Path, status: str):
    stacks: list[dict[str, Any]] = [{"StackStatus": status}]

    def answer(service: str, operation: str, parameters: object) -> dict[str, Any]:
        if operation == "delete_stack":
            stacks.clear()
        if operation == "create_stack":
            outputs = [{"OutputKey": "Machine", "OutputValue": "i-2"}]
            stacks.append({"StackStatus": "CREATE_COMPLETE", "Outputs": outputs})
        return {"Stacks": stacks}

    aws = FakeAws(answer)
    assert stack_of(aws, tmp_path, []).put(template_of(), lambda: None) == "i-2"
    assert [each for each in aws.operations() if "describe" not in each] == ["delete_stack", "create_stack"]


@pytest.mark.parametrize("after", [[], [{"StackStatus": "UPDATE_COMPLETE"}]])
def test_stack_that_somebody_deletes_or_changes_meanwhile_is_an_error_with_a_hint(tmp_path: Path, after: list[Any]):
    stacks = [{"StackStatus": "CREATE_COMPLETE"}]

    def answer(service: str, operation: str, parameters: object) -> dict[str, Any]:
        if operation == "update_stack":
            stacks[:] = after
        return {"Stacks": stacks}

    with pytest.raises(TargetError, match="has no machine with Grafana") as raised:
        stack_of(FakeAws(answer), tmp_path, []).put(template_of(), lambda: None)
    assert "`dalsegno dashboards deploy` again" in raised.value.hint


def without_cloudformation(folder: Path) -> HyperPodTarget:
    """Open the target of an operator who may do everything except use CloudFormation."""

    def answer(service: str, operation: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        if service == "cloudformation":
            raise explain(CloudRefusal.DENIED, f"AWS {service} {operation}", "as the test asked")
        return one_api("us-east-1").aws.call(service, operation, **parameters)

    root = folder / "clusters" / "demo"
    return HyperPodTarget(root, connect=lambda region: HyperPodApi(FakeAws(answer)), pause=lambda seconds: None)


def test_unknown_price_is_not_shown_as_zero():
    prices = PriceTable()
    assert price_text(prices) == "about 0.02 USD per hour"
    assert price_text(prices, "z9.huge") == "its price is unknown"


def test_refused_deployment_leaves_nothing_that_stops_down(aws, tmp_path: Path):
    target, denied = open_hyperpod(tmp_path), without_cloudformation(tmp_path)
    up(target, cluster_of(CPU, network()))
    target.apply(target.switch_exporters(True, print), print)
    with pytest.raises(CloudError) as raised:
        denied.start_grafana(print)
    assert raised.value.refusal is CloudRefusal.DENIED
    state = read_hyperpod_state(target.folder)
    assert state is not None and not state.grafana
    assert denied.destroy(print) and one_api("us-east-1").find("demo") is None and not target.folder.root.exists()


def test_down_deletes_the_cluster_although_the_stack_with_grafana_cannot_be_deleted(aws, tmp_path: Path):
    target = open_hyperpod(tmp_path)
    up(target, cluster_of(CPU, network()))
    target.apply(target.switch_exporters(True, print), print)
    target.start_grafana(print)
    with pytest.raises(CloudError):
        without_cloudformation(tmp_path).destroy(print)
    assert one_api("us-east-1").find("demo") is None and len(machines()) == 1
    assert target.destroy(print) and machines() == [] and not target.folder.root.exists()
