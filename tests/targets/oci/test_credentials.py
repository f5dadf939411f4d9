"""What signs requests to OCI: an API key, a session, or the instance. And why OCI refuses a signature."""

from __future__ import annotations

import time

import pytest

from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal
from dalsegno.targets.oci.credentials import (
    METADATA,
    OciCredentials,
    SignerKind,
    cause_of_refused_signature,
    is_oci_instance,
    read_expiry,
)
from tests.targets.cloud_tools import need_oci_sdk
from tests.targets.oci.emulator import serving, token_until, write_session
from tests.targets.oci.instance_service import TENANCY, instance_service

HOUR = 3600.0
STACK = "ocid1.ormstack.oc1.eu-frankfurt-1.gone"
WRONG, EXPIRED = CloudRefusal.WRONG_CREDENTIALS, CloudRefusal.EXPIRED


@pytest.mark.parametrize(
    ("kind", "expires", "cause"),
    [
        (SignerKind.SESSION, 99.0, EXPIRED),
        (SignerKind.SESSION, 101.0, WRONG),
        (SignerKind.SESSION, None, WRONG),
        (SignerKind.API_KEY, None, WRONG),
        (SignerKind.INSTANCE, None, WRONG),
    ],
)
def test_refused_signature_means_an_expired_session_only_after_its_end(kind, expires, cause):
    assert cause_of_refused_signature(kind, expires, now=100.0) is cause


@pytest.mark.parametrize("token", ["", "a", "a.b", "a.e30.", "a.bnVsbA.", "a.eyJleHAiOiAieCJ9.", "a.W10."])
def test_token_without_a_time_of_expiry_is_read_as_unknown(token):
    assert read_expiry(token) is None


def test_time_of_expiry_is_read_from_a_token():
    assert read_expiry(token_until(1_800_000_000)) == 1_800_000_000


@pytest.mark.parametrize(("kind", "refusal"), [(SignerKind.SESSION, WRONG), (SignerKind.SESSION, EXPIRED)])
def test_both_hints_for_a_session_name_the_command_that_renews_its_profile(kind, refusal):
    hint = OciCredentials(kind, "eu-frankfurt-1", "work").hints()[refusal]
    assert "`oci session authenticate --profile-name work --region eu-frankfurt-1`" in hint


def test_hint_for_an_instance_names_its_dynamic_group():
    found = OciCredentials(SignerKind.INSTANCE, "eu-frankfurt-1").explain_refusal(
        CloudRefusal.DENIED, "OCI create-stack", "not allowed", "NotAuthorizedOrNotFound", 0.0
    )
    assert "dynamic-group NAME" in found.hint


def test_machine_is_an_instance_of_oci_if_its_firmware_says_so(tmp_path):
    tag = tmp_path / "chassis_asset_tag"
    assert not is_oci_instance({}, tag)
    tag.write_text("OracleCloud.com\n")
    assert is_oci_instance({}, tag)
    tag.write_text("Amazon EC2\n")
    assert not is_oci_instance({}, tag)
    assert is_oci_instance({METADATA: "http://127.0.0.1:1/opc/v2"}, tag)


# With the SDK, against a server on loopback


@pytest.fixture
def server(tmp_path, monkeypatch):
    need_oci_sdk()
    monkeypatch.delenv(METADATA, raising=False)
    with serving(tmp_path) as found:
        yield found


def key_of(server) -> str:
    return server.requests[-1][3].partition('keyId="')[2].partition('"')[0]


def test_profile_with_an_api_key_signs_with_it(server):
    server.connect().has_stack(STACK)
    assert key_of(server).startswith("ocid1.tenancy.oc1..aaaa/ocid1.user.oc1..aaaa/20:3b:")


def test_profile_of_a_session_signs_with_its_token(server, tmp_path):
    expires = time.time() + HOUR
    manager = server.connect_with(write_session(tmp_path, expires))
    assert not manager.has_stack(STACK)
    assert key_of(server) == f"ST${token_until(expires)}"
    assert manager.tenancy == "ocid1.tenancy.oc1..aaaa"


@pytest.mark.parametrize(
    ("age_s", "cause"), [(HOUR, "expired credentials"), (-HOUR, "wrong credentials")], ids=("expired", "valid")
)
def test_refused_session_names_its_cause_and_how_to_log_in_again(server, tmp_path, age_s, cause):
    manager = server.connect_with(write_session(tmp_path, time.time() - age_s))
    server.memory.refusals = [("get-stack", EXPIRED)]
    with pytest.raises(CloudError, match=f"OCI get-stack: {cause}") as caught:
        manager.has_stack(STACK)
    assert "oci session authenticate --profile-name DEFAULT" in caught.value.hint


def test_session_that_was_renewed_in_another_terminal_is_read_again(server, tmp_path):
    manager = server.connect_with(write_session(tmp_path, time.time() - 1))
    renewed = time.time() + HOUR
    write_session(tmp_path, renewed)
    server.memory.refusals = [("get-stack", EXPIRED)]
    assert not manager.has_stack(STACK)
    assert key_of(server) == f"ST${token_until(renewed)}"


def test_refused_api_key_is_wrong_and_has_the_hint_to_check_the_profile(server):
    server.memory.refusals = [("get-stack", WRONG)]
    with pytest.raises(CloudError, match="OCI get-stack: wrong credentials") as caught:
        server.connect().has_stack(STACK)
    assert "check key, fingerprint and user in ~/.oci/config" in caught.value.hint


@pytest.mark.parametrize("broken", ["token", "session.pem"])
def test_session_whose_files_are_missing_or_broken_is_named(server, tmp_path, broken):
    profile = write_session(tmp_path, time.time() + HOUR)
    (tmp_path / broken).write_text("no key") if broken == "session.pem" else (tmp_path / broken).unlink()
    with pytest.raises(CloudError, match="profile `DEFAULT`") as caught:
        server.connect_with(profile)
    assert caught.value.refusal is CloudRefusal.NO_CREDENTIALS and "oci session authenticate" in caught.value.hint


def test_instance_without_a_profile_signs_as_itself(server, tmp_path, monkeypatch):
    with instance_service(time.time() + HOUR) as service:
        monkeypatch.setenv(METADATA, f"{service}/opc/v2")
        manager = server.connect_with(tmp_path / "missing", federation=f"{service}/v1/x509")
        assert not manager.has_stack(STACK)
    assert manager.tenancy == TENANCY
    assert key_of(server).startswith("ST$")


def test_instance_with_a_profile_uses_the_profile(server, monkeypatch):
    monkeypatch.setenv(METADATA, "http://127.0.0.1:1/opc/v2")
    assert server.connect().credentials.kind is SignerKind.API_KEY


@pytest.mark.skipif(is_oci_instance({}), reason="this machine is an instance of OCI")
def test_machine_elsewhere_without_a_profile_is_told_how_to_write_one(server, tmp_path):
    with pytest.raises(CloudError, match="profile `DEFAULT`") as caught:
        server.connect_with(tmp_path / "missing")
    assert "`oci setup config`" in caught.value.hint
