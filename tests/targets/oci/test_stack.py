"""A cluster on OCI from plan to removal: stack, PLAN, APPLY, outputs, DESTROY."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dalsegno.errors import NotThere, TargetError
from dalsegno.targets.base import ClusterPhase
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal
from dalsegno.targets.oci.resource_manager import FakeResourceManager, SdkResourceManager, StackJobState, StackOperation
from tests.targets.oci.conftest import FULL, GPUS, cluster_of, open_oci


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


def test_more_nodes_are_a_change_of_the_same_stack(folder):
    manager = FakeResourceManager()
    target = open_oci(folder, manager)
    up(target, cluster_of(folder))
    plan = target.plan(cluster_of(folder, GPUS.replace("nodes: 2", "nodes: 4")))
    assert "node_count: 2 → 4; changes in place" in plan.sentences()
    target.apply(plan, lambda text: None)
    assert len(manager.stacks) == 1
    assert next(iter(manager.stacks.values()))["node_count"] == "4"


def test_failed_job_keeps_its_log_and_up_continues_with_the_same_stack(folder):
    manager = FakeResourceManager(
        ends=[(StackJobState.SUCCEEDED, ""), (StackJobState.FAILED, "500-InternalError, Out of host capacity.")]
    )
    target = open_oci(folder, manager)
    with pytest.raises(TargetError, match="Out of host capacity"):
        up(target, cluster_of(folder))
    assert "line" in (target.folder.root / "operations" / "apply.log").read_text()
    assert target.summary().phase is ClusterPhase.HALF_MADE
    up(target, cluster_of(folder))
    assert len(manager.stacks) == 1
    assert target.summary().phase is ClusterPhase.UP


def test_down_destroys_the_resources_and_deletes_the_stack(folder):
    manager = FakeResourceManager()
    target = open_oci(folder, manager)
    up(target, cluster_of(folder, rest=FULL))
    assert target.removal().storage == ("home",), "`down` asks before it deletes data"
    assert target.destroy(lambda text: None)
    assert manager.started[-1][0] is StackOperation.DESTROY
    assert manager.stacks == {}
    assert not target.destroy(lambda text: None)


def test_down_of_a_stack_that_somebody_deleted_succeeds(folder):
    manager = FakeResourceManager()
    target = open_oci(folder, manager)
    up(target, cluster_of(folder))
    manager.stacks.clear()
    assert target.destroy(lambda text: None)


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
def resource_manager(tmp_path):
    """A recorder that plays Resource Manager, and a profile with a key that nobody else has."""
    pytest.importorskip("oci")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    no_password = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, no_password)
    (tmp_path / "key.pem").write_bytes(pem)
    (tmp_path / "key.pem").chmod(0o600)
    (tmp_path / "config").write_text(
        "[DEFAULT]\nuser=ocid1.user.oc1..aaaa\nfingerprint=20:3b:97:13:55:1c:5b:0d:d3:37:d8:50:4e:c5:3a:34\n"
        f"tenancy=ocid1.tenancy.oc1..aaaa\nregion=eu-frankfurt-1\nkey_file={tmp_path}/key.pem\n"
    )
    (tmp_path / "config").chmod(0o600)
    requests: list[tuple[str, str, dict[str, object], str]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0].rpartition("/20180917")[2]
            content = json.loads(body or b"{}")
            requests.append((self.command, path, content, self.headers.get("Authorization", "")))
            status, answer = _answer(self.command, path)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            text = json.dumps(answer).encode()
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = do_DELETE = _serve

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    yield SdkResourceManager("eu-frankfurt-1", "DEFAULT", str(tmp_path / "config"), endpoint), requests
    server.shutdown()
    server.server_close()


def _answer(method: str, path: str) -> tuple[int, object]:
    if path.endswith("/stacks/gone"):
        return 404, {"code": "NotAuthorizedOrNotFound", "message": "not here"}
    if path.endswith("/stacks/secret"):
        return 401, {"code": "NotAuthenticated", "message": "who are you?"}
    if path.endswith("/outputs"):
        items = [{"outputName": "controller", "outputValue": "203.0.113.7", "isSensitive": False}]
        items.append({"outputName": "grafana_password", "outputValue": "hidden", "isSensitive": True})
        return 200, {"items": items}
    if path.endswith("/logs"):
        return 200, [{"message": "Apply complete!", "level": "INFO", "type": "TERRAFORM_CONSOLE"}]
    if "/jobs" in path:
        return 200, {"id": "job-1", "lifecycleState": "SUCCEEDED"}
    return 200, {"id": "stack-1", "lifecycleState": "ACTIVE"}


@pytest.mark.long
def test_sdk_sends_signed_requests_that_resource_manager_knows(resource_manager):
    manager, requests = resource_manager
    stack = manager.create_stack("demo", "ocid1.compartment.oc1..a", b"PK zip", {"node_count": "2"})
    planned = manager.start(stack, StackOperation.PLAN)
    manager.start(stack, StackOperation.APPLY, planned)
    manager.start(stack, StackOperation.DESTROY)
    assert manager.job("job-1").state is StackJobState.SUCCEEDED
    assert manager.log("job-1") == ["Apply complete!"]
    assert manager.outputs("job-1") == {"controller": "203.0.113.7"}, "sensitive outputs are not read"
    bodies = [body for method, path, body, _ in requests if method == "POST"]
    assert base64.b64decode(bodies[0]["configSource"]["zipFileBase64Encoded"]) == b"PK zip"
    assert [each["jobOperationDetails"]["operation"] for each in bodies[1:]] == ["PLAN", "APPLY", "DESTROY"]
    assert bodies[2]["jobOperationDetails"]["executionPlanStrategy"] == "FROM_PLAN_JOB_ID"
    assert all(signed.startswith("Signature") for *_, signed in requests)


@pytest.mark.long
def test_sdk_errors_are_named(resource_manager, tmp_path):
    manager, _ = resource_manager
    assert not manager.has_stack("gone")
    with pytest.raises(CloudError) as caught:
        manager.has_stack("secret")
    assert caught.value.refusal is CloudRefusal.WRONG_CREDENTIALS
    with pytest.raises(CloudError) as caught:
        SdkResourceManager("eu-frankfurt-1", "NOBODY", str(tmp_path / "config"))
    assert caught.value.refusal is CloudRefusal.NO_CREDENTIALS
