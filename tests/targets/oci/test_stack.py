"""A cluster on OCI from plan to removal: stack, PLAN, APPLY, outputs, DESTROY."""

from __future__ import annotations

import base64
import json

import pytest

from dalsegno.errors import NotThere, TargetError
from dalsegno.targets.base import ClusterPhase
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal
from dalsegno.targets.oci.resource_manager import FakeResourceManager, SdkResourceManager, StackOperation
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


def test_up_applies_exactly_the_plan_that_was_shown_and_follows_its_log(folder):
    manager = FakeResourceManager()
    target = open_oci(folder, manager)
    said = up(target, cluster_of(folder))
    assert manager.started == [(StackOperation.PLAN, ""), (StackOperation.APPLY, "job-1")]
    assert "job-1: line 1" in said and "job-2: line 2" in said
    assert said[-1] == "the controller is 203.0.113.7"
    assert target.summary().phase is ClusterPhase.UP
    assert target.plan(cluster_of(folder)).empty
    assert target.shell(["hostname"], {}, "/").argv[-2:] == ["opc@203.0.113.7", "hostname"]
    assert "ProxyCommand=" in " ".join(target.shell([], {}, "/", host="compute-1").argv)


def test_down_destroys_the_resources_and_deletes_the_stack(folder):
    manager = FakeResourceManager()
    target = open_oci(folder, manager)
    up(target, cluster_of(folder, rest=FULL))
    assert target.removal().storage == ("home",), "`down` asks before it deletes data"
    assert target.destroy(lambda text: None)
    assert manager.started[-1][0] is StackOperation.DESTROY
    assert manager.stacks == {}


def test_stack_of_others_with_the_same_name_is_left_alone(folder):
    manager = FakeResourceManager()
    up(open_oci(folder, manager), cluster_of(folder))
    (folder / "other").mkdir()
    with pytest.raises(TargetError, match="a stack `demo` already") as caught:
        open_oci(folder / "other", manager).plan(cluster_of(folder))
    assert next(iter(manager.stacks)) in caught.value.hint


def test_what_is_missing_is_named_with_the_fix(folder):
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
    assert "cluster user add ann" in (folder / "out" / "users.sh").read_text()


# With the SDK, against a recorder on loopback


@pytest.fixture
def server(tmp_path):
    pytest.importorskip("oci")
    with serving(tmp_path) as found:
        yield found


def test_sdk_sends_signed_requests_that_resource_manager_knows(server):
    manager = server.connect()
    stack = manager.create_stack("demo", "ocid1.compartment.oc1..a", b"PK zip", {"node_count": "2"})
    planned = manager.start(stack, StackOperation.PLAN)
    manager.start(stack, StackOperation.APPLY, planned)
    manager.start(stack, StackOperation.DESTROY)
    assert "grafana_password" not in manager.outputs(planned), "sensitive outputs are not read"
    bodies = [body for method, path, body, _ in server.requests if method == "POST"]
    assert base64.b64decode(bodies[0]["configSource"]["zipFileBase64Encoded"]) == b"PK zip"
    assert [each["jobOperationDetails"]["operation"] for each in bodies[1:]] == ["PLAN", "APPLY", "DESTROY"]
    assert bodies[2]["jobOperationDetails"]["executionPlanStrategy"] == "FROM_PLAN_JOB_ID"
    assert all(signed.startswith("Signature") for *_, signed in server.requests)


def test_profile_that_does_not_exist_is_named(server):
    assert not server.connect().has_stack("ocid1.ormstack.oc1.eu-frankfurt-1.gone")
    with pytest.raises(CloudError, match="profile `NOBODY`") as caught:
        SdkResourceManager("eu-frankfurt-1", "NOBODY", str(server.profile))
    assert caught.value.refusal is CloudRefusal.NO_CREDENTIALS
