"""Tests of which credential is sent to which server."""

import base64
import json
import os
from pathlib import Path

import pytest

from dalsegno.containers.credentials import (
    Credential,
    CredentialFinder,
    RegistryServer,
    UnknownRealm,
    are_of_one_domain,
    parse_docker_config,
    parse_netrc,
    server_of,
)
from dalsegno.errors import DalsegnoError
from dalsegno.image_name import DOCKER_HUB
from dalsegno.system.processes import Completed, FakeRunner

NETRC = """
# NGC needs both
machine nvcr.io login $oauthtoken password NGC
machine authn.nvidia.com login $oauthtoken password NGC
machine auth.docker.io
  login ann
  password word
machine ghcr.io login bob password $TOKEN
"""


def auth(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def wallet(home: Path, runner: FakeRunner | None = None, **env: str) -> CredentialFinder:
    return CredentialFinder(env, home, runner or FakeRunner({}))


def https(address: str) -> RegistryServer:
    server = server_of(f"https://{address}/")
    assert server
    return server


def write(home: Path, path: str, text: str) -> None:
    (home / path).parent.mkdir(parents=True, exist_ok=True)
    (home / path).write_text(text)


def test_enroot_credentials_may_span_lines_and_use_variables(tmp_path: Path):
    found = dict(parse_netrc(NETRC))
    assert found["nvcr.io"] == Credential("$oauthtoken", "NGC")
    assert found["auth.docker.io"] == Credential("ann", "word")
    write(tmp_path, ".config/enroot/.credentials", NETRC)
    assert wallet(tmp_path, TOKEN="gh").for_registry(https("ghcr.io")) == Credential("bob", "gh")


def test_incomplete_credential_lines_are_ignored():
    text = (
        "login a password b\nmachine x account a password b\nmachine y login a\nmachine z login a password b\nmachine"
    )
    assert [machine for machine, _ in parse_netrc(text)] == ["z"]


def test_password_command_is_refused_for_its_own_machine_only(tmp_path: Path):
    write(tmp_path, ".config/enroot/.credentials", f"machine ecr.example login a password $(aws ecr)\n{NETRC}")
    with pytest.raises(DalsegnoError, match="does not run") as caught:
        wallet(tmp_path).for_registry(https("ecr.example"))
    assert "credential helper" in caught.value.hint
    assert wallet(tmp_path).for_registry(https("nvcr.io"))


def test_a_password_goes_to_its_registry_only(tmp_path: Path):
    write(tmp_path, ".config/enroot/.credentials", NETRC)
    write(tmp_path, ".docker/config.json", json.dumps({"auths": {"quay.io": auth("cem", "q:w")}}))
    mine = wallet(tmp_path)
    assert mine.for_registry(https("nvcr.io")) == Credential("$oauthtoken", "NGC")
    assert mine.for_realm(https(DOCKER_HUB), https("auth.docker.io")) == Credential("ann", "word")
    assert mine.for_registry(https("quay.io")) == Credential("cem", "q:w")
    assert mine.for_registry(https("evil.example")) is None
    assert mine.for_registry(https("nvcr.io"), user="other") is None


@pytest.mark.parametrize("realm", ["auth.docker.io", "nvcr.io", "quay.io", "authn.nvidia.com"])
def test_realm_credentials_are_not_used_for_a_registry_that_only_names_the_realm(tmp_path: Path, realm: str):
    write(tmp_path, ".config/enroot/.credentials", NETRC)
    write(tmp_path, ".docker/config.json", json.dumps({"auths": {"quay.io": auth("cem", "q:w")}}))
    for registry in ("evil.example", f"evil.{realm}", f"{realm}.evil.example", "10.0.0.1:5000"):
        assert wallet(tmp_path).for_realm(https(registry), https(realm)) is None


def test_registry_password_goes_to_known_realms_only(tmp_path: Path):
    def netrc(*machines: str) -> CredentialFinder:
        lines = [f"machine {each} login ann password word" for each in machines]
        write(tmp_path, ".config/enroot/.credentials", "\n".join(lines))
        return wallet(tmp_path)

    ann = Credential("ann", "word")
    registry, realm = https("reg.example.org"), https("login.other.net")
    with pytest.raises(UnknownRealm, match=r"login\.other\.net") as caught:
        netrc("reg.example.org").for_realm(registry, realm)
    assert "machine login.other.net login USER" in caught.value.hint
    assert netrc("reg.example.org", "login.other.net").for_realm(registry, realm) == ann
    for same in ("reg.example.org", "reg.example.org:8443", "auth.example.org", "example.org"):
        assert netrc("reg.example.org").for_realm(registry, https(same)) == ann
    plain = RegistryServer("http", "registry-1.docker.io", 80)
    assert netrc("auth.docker.io").for_realm(plain, https("auth.docker.io")) is None


def test_machine_without_port_does_not_match_other_ports_without_tls(tmp_path: Path):
    write(tmp_path, ".config/enroot/.credentials", "machine Git.example login ann password word")
    mine = wallet(tmp_path)
    assert mine.for_registry(https("git.example:5005")) and mine.for_registry(RegistryServer("http", "git.example", 80))
    assert mine.for_registry(RegistryServer("http", "git.example", 5005)) is None
    write(tmp_path, ".config/enroot/.credentials", "machine git.example:5005 login ann password word")
    assert (
        mine.for_registry(RegistryServer("http", "git.example", 5005))
        and mine.for_registry(https("git.example")) is None
    )


def test_docker_key_with_https_is_not_for_a_registry_without_tls(tmp_path: Path):
    write(tmp_path, ".docker/config.json", json.dumps({"auths": {"https://reg.example:5000": auth("cem", "w")}}))
    assert wallet(tmp_path).for_registry(https("reg.example:5000"))
    assert wallet(tmp_path).for_registry(RegistryServer("http", "reg.example", 5000)) is None


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("https://Auth.example/token?x=1", RegistryServer("https", "auth.example", 443)),
        ("http://[::1]:5000/", RegistryServer("http", "::1", 5000)),
        ("https://auth.docker.io@evil.example/", None),
        ("https://auth.docker.io:x@evil.example/", None),
        ("https://auth.docker.io\\@evil.example/", None),
        ("https://auth.docker.io:0/", None),
        ("https://auth.docker.io:x/", None),
        ("https://evil.example/\x1b[2J", None),
        ("file:///etc/shadow", None),
        ("ftp://evil.example/", None),
        ("https:///token", None),
        ("", None),
    ],
)
def test_server_of_a_url_is_the_host_that_a_request_reaches(url: str, server: RegistryServer | None):
    assert server_of(url) == server


def test_hosts_are_of_one_domain_by_their_names_alone():
    assert are_of_one_domain(https("registry.gitlab.com"), https("gitlab.com"))
    assert not are_of_one_domain(https("registry.com"), https("auth.com"))
    assert not are_of_one_domain(https("10.0.0.1"), https("10.1.0.1"))
    assert not are_of_one_domain(RegistryServer("http", "a.example.org", 80), https("b.example.org"))


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user take root")
def test_credentials_file_of_another_user_is_not_read_and_is_reported(tmp_path: Path):
    path = tmp_path / ".docker/config.json"
    write(tmp_path, ".docker/config.json", json.dumps({"auths": {"quay.io": auth("mallory", "w")}}))
    os.chown(path, 12345, 12345)
    mine = wallet(tmp_path)
    assert mine.for_registry(https("quay.io")) is None
    assert mine.unused == [f"{path} was not read because it belongs to another user (uid 12345)"]
    assert wallet(tmp_path, SUDO_UID="12345").for_registry(https("quay.io"))
    os.chown(path, 0, 0)
    path.chmod(0o666)
    assert wallet(tmp_path).for_registry(https("quay.io")) is None
    path.unlink()
    os.mkfifo(path)  # opening it to read would block forever
    assert wallet(tmp_path).for_registry(https("quay.io")) is None


def test_docker_hub_is_found_by_the_key_that_docker_login_writes(tmp_path: Path):
    write(tmp_path, ".docker/config.json", json.dumps({"auths": {"https://index.docker.io/v1/": auth("ann", "w")}}))
    assert wallet(tmp_path).for_realm(https(DOCKER_HUB), https("auth.docker.io")) == Credential("ann", "w")


def test_credentials_are_read_from_podman_and_docker_config_folders(tmp_path: Path):
    write(tmp_path, "run/containers/auth.json", json.dumps({"auths": {"quay.io": auth("ann", "w")}}))
    assert wallet(tmp_path, XDG_RUNTIME_DIR=str(tmp_path / "run")).for_registry(https("quay.io")) == Credential(
        "ann", "w"
    )
    write(tmp_path, "d/config.json", json.dumps({"auths": {"quay.io": {"identitytoken": "T"}}}))
    mine = wallet(tmp_path, DOCKER_CONFIG=str(tmp_path / "d"))
    assert mine.for_registry(https("quay.io")) == Credential("", "", "T")


def test_docker_credential_helpers_are_used(tmp_path: Path):
    write(tmp_path, ".docker/config.json", json.dumps({"credHelpers": {"quay.io": "vault"}, "auths": {}}))
    answer = json.dumps({"Username": "ann", "Secret": "w"})

    def helper(argv: tuple[str, ...], stdin: str | None) -> Completed | str:
        return answer if (argv, stdin) == (("docker-credential-vault", "get"), "quay.io") else Completed(argv, 1)

    assert wallet(tmp_path, FakeRunner(helper)).for_registry(https("quay.io")) == Credential("ann", "w")
    assert wallet(tmp_path, FakeRunner(helper)).for_registry(https("ghcr.io")) is None


def test_a_password_is_never_shown():
    assert "secret" not in repr(Credential("ann", "secret", "secret too"))


@pytest.mark.parametrize("text", ["{", "[" * 5000], ids=["cut", "deep"])
def test_docker_config_that_is_not_json_is_an_error_with_a_hint(tmp_path: Path, text: str):
    with pytest.raises(DalsegnoError, match="not valid JSON") as caught:
        parse_docker_config(text, tmp_path / "config.json")
    assert caught.value.hint


def test_unreadable_entries_of_docker_config_are_ignored(tmp_path: Path):
    assert parse_docker_config('{"auths": {"x": 7, "y": {"auth": "%%"}}}', tmp_path).auths == {"x": None, "y": None}
