"""Whose password is sent to whom."""

import base64
import json
from pathlib import Path

import pytest

from dalsegno.containers.credentials import Credential, Wallet, parse_docker_config, parse_netrc
from dalsegno.errors import DalsegnoError
from dalsegno.image_name import DOCKER_HUB
from dalsegno.system.processes import Completed, FakeRunner

NETRC = """
# NGC wants both
machine nvcr.io login $oauthtoken password NGC
machine authn.nvidia.com login $oauthtoken password NGC
machine auth.docker.io
  login ann
  password word
machine ghcr.io login bob password $TOKEN
"""


def auth(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def wallet(home: Path, runner: FakeRunner | None = None, **env: str) -> Wallet:
    return Wallet(env, home, runner or FakeRunner({}))


def write(home: Path, path: str, text: str) -> None:
    (home / path).parent.mkdir(parents=True, exist_ok=True)
    (home / path).write_text(text)


def test_enroots_file_is_read_over_lines_and_variables_are_looked_up():
    found = dict(parse_netrc(NETRC, {"TOKEN": "gh"}))
    assert found["nvcr.io"] == Credential("$oauthtoken", "NGC")
    assert found["auth.docker.io"] == Credential("ann", "word")
    assert found["ghcr.io"] == Credential("bob", "gh")


def test_lines_that_lack_a_part_are_passed_over():
    text = (
        "login a password b\nmachine x account a password b\nmachine y login a\nmachine z login a password b\nmachine"
    )
    assert [machine for machine, _ in parse_netrc(text, {})] == ["z"]


def test_a_password_that_is_a_command_is_not_run():
    with pytest.raises(DalsegnoError, match="not run") as caught:
        parse_netrc("machine x login a password $(aws ecr get-login-password)", {})
    assert "credential helper" in caught.value.hint


def test_a_password_goes_to_its_registry_only(tmp_path: Path):
    write(tmp_path, ".config/enroot/.credentials", NETRC)
    write(tmp_path, ".docker/config.json", json.dumps({"auths": {"quay.io": auth("cem", "q:w")}}))
    mine = wallet(tmp_path)
    assert mine.find("nvcr.io", "nvcr.io") == Credential("$oauthtoken", "NGC")
    assert mine.find(DOCKER_HUB, "auth.docker.io") == Credential("ann", "word")
    assert mine.find("quay.io", "quay.io") == Credential("cem", "q:w")
    assert mine.find("evil.example", "evil.example") is None
    assert mine.find("nvcr.io", "nvcr.io", user="other") is None


def test_docker_hub_has_the_name_that_docker_login_gave_it(tmp_path: Path):
    write(tmp_path, ".docker/config.json", json.dumps({"auths": {"https://index.docker.io/v1/": auth("ann", "w")}}))
    assert wallet(tmp_path).find(DOCKER_HUB, "auth.docker.io") == Credential("ann", "w")


def test_podmans_file_and_other_places_are_looked_at(tmp_path: Path):
    write(tmp_path, "run/containers/auth.json", json.dumps({"auths": {"quay.io": auth("ann", "w")}}))
    assert wallet(tmp_path, XDG_RUNTIME_DIR=str(tmp_path / "run")).find("quay.io", "") == Credential("ann", "w")
    write(tmp_path, "d/config.json", json.dumps({"auths": {"quay.io": {"identitytoken": "T"}}}))
    assert wallet(tmp_path, DOCKER_CONFIG=str(tmp_path / "d")).find("quay.io", "") == Credential("", "", "T")


def test_dockers_helpers_are_asked(tmp_path: Path):
    write(tmp_path, ".docker/config.json", json.dumps({"credHelpers": {"quay.io": "vault"}, "auths": {}}))
    answer = json.dumps({"Username": "ann", "Secret": "w"})

    def helper(argv: tuple[str, ...], stdin: str | None) -> Completed | str:
        return answer if (argv, stdin) == (("docker-credential-vault", "get"), "quay.io") else Completed(argv, 1)

    assert wallet(tmp_path, FakeRunner(helper)).find("quay.io", "") == Credential("ann", "w")
    assert wallet(tmp_path, FakeRunner(helper)).find("ghcr.io", "") is None


def test_a_password_is_never_shown():
    assert "secret" not in repr(Credential("ann", "secret", "secret too"))


def test_a_broken_file_is_told(tmp_path: Path):
    with pytest.raises(DalsegnoError, match="no JSON") as caught:
        parse_docker_config("{", tmp_path / "config.json")
    assert caught.value.hint
    assert parse_docker_config('{"auths": {"x": 7, "y": {"auth": "%%"}}}', tmp_path).auths == {"x": None, "y": None}
