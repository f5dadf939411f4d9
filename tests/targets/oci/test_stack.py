"""A cluster on OCI from plan to removal: stack, PLAN, APPLY, outputs, DESTROY."""

from __future__ import annotations

import base64
import json

import pytest

from dalsegno.errors import NotThere, TargetError
from dalsegno.targets.base import ClusterPhase
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal
from dalsegno.targets.oci.resource_manager import FakeResourceManager, SdkResourceManager, StackOperation
from tests.targets.cloud_tools import need_oci_sdk
from tests.targets.oci.conftest import FULL, GPUS, cluster_of, open_oci
from tests.targets.oci.emulator import serving


def up(target, cluster) -> list[str]:
    said: list[str] = []
    target.apply(target.plan(cluster), said.append)
    return said


def test_plan_names_consequences_and_variables(folder):
    plan = open_oci(folder, FakeResourceManager()).plan(cluster_of(folder))
    text = "\n".join([*plan.sentences(), *plan.details()])
    assert "creates demo on oci: 2 nodes (BM.GPU.H100.8) in 1 partition" in text
    assert "takes about 30 to 60 minutes" in text
    assert 'cluster_network_shape = "BM.GPU.H100.8"' in text
    assert "AAAA" not in text


def test_plan_prints_the_iam_policies_until_the_stack_exists(folder):
    target, cluster = open_oci(folder, FakeResourceManager()), cluster_of(folder)
    printed = [line.removeprefix("IAM policy: ") for line in target.plan(cluster).details() if "IAM policy: " in line]
    written = target.platform_files(cluster_of(folder, settings="  tenancy: ocid1.tenancy.oc1..a"))["iam-policies.txt"]
    assert printed == written.splitlines() and len(printed) == 4
    up(target, cluster)
    assert not [line for line in target.plan(cluster).details() if "IAM" in line]


def test_plan_says_that_the_stack_has_its_own_monitoring(folder):
    closed = "  allowed_ips: 203.0.113.0/24\n"
    asked = cluster_of(folder, settings=closed, rest="monitoring: {prometheus: true}\n")
    default = cluster_of(folder, settings=closed)
    said = [open_oci(folder, FakeResourceManager()).plan(each).notes for each in (asked, default)]
    assert said == [("the stack sets up its own monitoring; `monitoring.prometheus` starts no second one",), ()]


def test_plan_says_that_all_addresses_reach_sshd(folder):
    notes = open_oci(folder, FakeResourceManager()).plan(cluster_of(folder)).notes
    assert notes == ("sshd of the controller and the login node accepts all addresses; `oci.allowed_ips` limits them",)


def test_up_applies_exactly_the_plan_that_was_shown_and_follows_its_log(folder):
    manager = FakeResourceManager()
    target = open_oci(folder, manager)
    said = up(target, cluster_of(folder))
    assert manager.started == [(StackOperation.PLAN, ""), (StackOperation.APPLY, "job-1")]
    assert "job-1: line 1" in said and "job-2: line 2" in said
    assert "the controller is 203.0.113.7" in said and said[-1] == "installing Dal Segno on 2 nodes"
    assert target.summary().phase is ClusterPhase.UP
    assert target.plan(cluster_of(folder)).empty
    assert target.removal().homes == ("opc",), "they are on the controller"
    assert target.shell(["hostname"], {}, "/").argv[-2:] == ["opc@203.0.113.7", "hostname"]
    assert "ProxyCommand=" in " ".join(target.shell([], {}, "/", host="compute-1").argv)


def test_down_destroys_the_resources_and_deletes_the_stack(folder):
    manager = FakeResourceManager()
    target = open_oci(folder, manager)
    up(target, cluster_of(folder, rest=FULL))
    assert target.removal().storage == ("home",), "`down` asks before it deletes data"
    assert target.removal().homes == (), "they are on file storage"
    assert target.destroy(lambda text: None)
    assert manager.started[-1][0] is StackOperation.DESTROY
    assert manager.stacks == {}


def test_stack_gets_the_tags_of_the_file_and_loses_those_that_left_it(folder):
    manager = FakeResourceManager()
    target = open_oci(folder, manager)
    up(target, cluster_of(folder, settings="  tags: {team: nlp, owner: ann}\n"))
    (tags,) = manager.tags.values()
    assert tags == {"team": "nlp", "owner": "ann"}
    plan = target.plan(cluster_of(folder, settings="  tags: {team: vision}\n"))
    assert [change.sentence() for change in plan.changes] == [
        "tag team of the stack: nlp → vision; changes in place",
        "tag owner of the stack: ann → none; changes in place",
    ]
    target.apply(plan, lambda text: None)
    assert [*manager.tags.values()] == [{"team": "vision"}]
    assert target.plan(cluster_of(folder, settings="  tags: {team: vision}\n")).empty


def test_declined_change_restores_the_tags_of_the_stack(folder):
    manager = FakeResourceManager()
    target = open_oci(folder, manager)
    up(target, cluster_of(folder, settings="  tags: {team: nlp}\n"))
    manager.planned = ("Plan: 0 to add, 0 to change, 1 to destroy.",)
    with pytest.raises(TargetError, match="the stack was not changed"):
        up(target, cluster_of(folder, settings="  tags: {owner: ann}\n"))
    assert [*manager.tags.values()] == [{"team": "nlp"}]


def test_stack_of_others_with_the_same_name_is_left_alone(folder):
    manager = FakeResourceManager()
    up(open_oci(folder, manager), cluster_of(folder))
    (folder / "other").mkdir()
    with pytest.raises(TargetError, match="a stack `demo` already") as caught:
        open_oci(folder / "other", manager).plan(cluster_of(folder))
    assert next(iter(manager.stacks)) in caught.value.hint


def test_missing_controller_archive_or_key_is_named(folder):
    target = open_oci(folder, FakeResourceManager())
    with pytest.raises(NotThere, match="has no controller yet"):
        target.shell([], {}, "/")
    (folder / "stack.zip").write_text("no archive")
    with pytest.raises(TargetError, match="is not a zip file"):
        up(target, cluster_of(folder))
    (folder / "key.pub").unlink()
    with pytest.raises(TargetError, match=r"public key .* cannot be read"):
        target.plan(cluster_of(folder))


def test_plan_writes_files_for_terraform_and_the_owner_of_the_tenancy(folder, command, monkeypatch):
    from tests.targets.oci.conftest import SPEC

    monkeypatch.setenv("DALSEGNO_HOME", str(folder / "home"))
    (folder / "cluster.yaml").write_text(SPEC.format(folder=folder, partitions=GPUS, settings="", rest=FULL))
    done = command("plan", folder / "cluster.yaml", "--write", folder / "out")
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "out" / "terraform.tfvars.json").read_text())["node_count"] == 2
    assert "manage all-resources" in (folder / "out" / "iam-policies.txt").read_text()
    assert "add_container_user ann '' --name ann" in (folder / "out" / "users.sh").read_text()
    assert (folder / "out" / "install.sh").read_text().endswith("exec bash /config/dalsegno/setup.sh head\n")


# With the SDK, against a recorder on loopback


@pytest.fixture
def server(tmp_path):
    need_oci_sdk()
    with serving(tmp_path) as found:
        yield found


def test_sdk_sends_signed_requests_that_resource_manager_knows(server):
    manager = server.connect()
    stack = manager.create_stack("demo", "ocid1.compartment.oc1..a", b"PK zip", {"node_count": "2"}, {"team": "nlp"})
    planned = manager.start(stack, StackOperation.PLAN)
    manager.start(stack, StackOperation.APPLY, planned)
    manager.start(stack, StackOperation.DESTROY)
    assert "grafana_password" not in manager.outputs(planned), "sensitive outputs are not read"
    bodies = [body for method, path, body, _ in server.requests if method == "POST"]
    assert base64.b64decode(bodies[0]["configSource"]["zipFileBase64Encoded"]) == b"PK zip"
    assert bodies[0]["freeformTags"] == {"team": "nlp", "dalsegno-cluster": "demo"}
    assert [each["jobOperationDetails"]["operation"] for each in bodies[1:]] == ["PLAN", "APPLY", "DESTROY"]
    assert bodies[2]["jobOperationDetails"]["executionPlanStrategy"] == "FROM_PLAN_JOB_ID"
    assert all(signed.startswith("Signature") for *_, signed in server.requests)


def test_sdk_keeps_the_tags_that_others_gave_the_stack(server):
    manager = server.connect()
    stack = manager.create_stack("demo", "ocid1.compartment.oc1..a", b"PK zip", {}, {"team": "nlp"})
    server.memory.tags[stack]["cost-center"] = "42"
    manager.update_stack(stack, {"node_count": "3"}, {"owner": "ann"}, {"team"})
    assert server.memory.tags[stack] == {"dalsegno-cluster": "demo", "cost-center": "42", "owner": "ann"}
    manager.update_stack(stack, {"node_count": "4"}, {})
    assert "freeformTags" not in server.requests[-1][2], "without tags of ours, nothing is said about them"


def test_profile_that_does_not_exist_is_named(server):
    assert not server.connect().has_stack("ocid1.ormstack.oc1.eu-frankfurt-1.gone")
    with pytest.raises(CloudError, match="profile `NOBODY`") as caught:
        SdkResourceManager("eu-frankfurt-1", "NOBODY", str(server.profile))
    assert caught.value.refusal is CloudRefusal.NO_CREDENTIALS
