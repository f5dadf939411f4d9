"""Who we are to a registry: the files that Enroot, Docker, Podman and Skopeo keep, and Docker's helper programs."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.image_name import DOCKER_HUB
from dalsegno.system.files import read_text
from dalsegno.system.processes import Runner

_HUB_KEYS = ("https://index.docker.io/v1/", "docker.io", "index.docker.io", "auth.docker.io", DOCKER_HUB)
_HELPER = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Credential:
    """A user and a password, or a token that stands for both."""

    user: str
    password: str = field(repr=False)
    identity_token: str = field(default="", repr=False)


@dataclass(frozen=True)
class Wallet:
    """Where credentials are looked for."""

    env: Mapping[str, str]
    home: Path
    runner: Runner
    lacking: list[str] = field(default_factory=list)  # helpers that a file names, and that could not be started

    def find(self, registry: str, realm_host: str, user: str = "") -> Credential | None:
        """The first that fits; Enroot's file names the host that gives tokens, Docker's the registry."""
        for found in self._all(registry, realm_host):
            if found.identity_token or not user or found.user == user:
                return found
        return None

    def _all(self, registry: str, realm_host: str) -> Iterator[Credential]:
        hosts = _hosts(registry, realm_host)
        for machine, credential in parse_netrc(_text_of(self._enroot_file()), self.env):
            if machine in hosts:
                yield credential
        for path in self._docker_files():
            yield from self._of_docker(path, _keys(registry))

    def _enroot_file(self) -> Path:
        config = self.env.get("XDG_CONFIG_HOME") or str(self.home / ".config")
        return Path(self.env.get("ENROOT_CONFIG_PATH") or f"{config}/enroot") / ".credentials"

    def _docker_files(self) -> list[Path]:
        named = [Path(value) for name in ("REGISTRY_AUTH_FILE",) if (value := self.env.get(name))]
        runtime = self.env.get("XDG_RUNTIME_DIR")
        podman = [Path(runtime) / "containers/auth.json"] if runtime else []
        config = Path(self.env.get("DOCKER_CONFIG") or self.home / ".docker") / "config.json"
        return [*named, *podman, self.home / ".config/containers/auth.json", config]

    def _of_docker(self, path: Path, keys: tuple[str, ...]) -> Iterator[Credential]:
        value = parse_docker_config(_text_of(path), path)
        for key in keys:
            helper = value.helpers.get(key) or (value.store if key in value.auths or key == keys[0] else "")
            if helper:
                yield from self._from_helper(helper, key)
            written = value.auths.get(key)
            if written is not None:
                yield written

    def _from_helper(self, helper: str, key: str) -> Iterator[Credential]:
        if not _HELPER.fullmatch(helper):
            return
        program = f"docker-credential-{helper}"
        try:
            said = self.runner.run([program, "get"], stdin=key, env=self.env, timeout_s=60)
        except DalsegnoError:  # a helper of another machine: the registry will say whether it wants to know us
            self.lacking.extend({program}.difference(self.lacking))
            return
        try:
            value = json.loads(said.stdout) if said.exit_code == 0 else {}
        except ValueError:
            value = {}
        if isinstance(value, dict) and value.get("Secret"):
            user, secret = str(value.get("Username", "")), str(value["Secret"])
            yield Credential("", "", secret) if user == "<token>" else Credential(user, secret)


def _text_of(path: Path) -> str:
    try:
        return read_text(path) or ""
    except (OSError, UnicodeDecodeError) as error:
        raise DalsegnoError(
            f"{path} cannot be read: {error}", hint="it holds credentials; look at its rights"
        ) from error


def _hosts(registry: str, realm_host: str) -> set[str]:
    names = {registry, realm_host, registry.partition(":")[0], realm_host.partition(":")[0]} - {""}
    return names | ({"docker.io", "index.docker.io"} if registry == DOCKER_HUB else set())


def _keys(registry: str) -> tuple[str, ...]:
    return _HUB_KEYS if registry == DOCKER_HUB else (registry, f"https://{registry}", f"https://{registry}/v2/")


# What the files say ----------------------------------------------------------------------------------------------


def parse_netrc(text: str, env: Mapping[str, str]) -> list[tuple[str, Credential]]:
    """`machine HOST login USER password WORD`, in this order, over lines or not; `$NAME` is looked up if it is set."""
    bare = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    words = " ".join(bare).split()
    found: list[tuple[str, dict[str, str]]] = []
    at = 0
    while at < len(words) - 1:
        key, value = words[at], words[at + 1]
        if key == "machine":
            found.append((value, {}))
        elif key in ("login", "password", "account") and found:
            found[-1][1].setdefault(key, value)
        at += 2 if key in ("machine", "login", "password", "account") else 1
    whole = [(machine, each) for machine, each in found if {"login", "password"} <= set(each)]
    return [(machine, Credential(each["login"], _expanded(each["password"], machine, env))) for machine, each in whole]


def _expanded(password: str, machine: str, env: Mapping[str, str]) -> str:
    if password.startswith(("$(", "`")):
        raise DalsegnoError(
            f"the password for {machine} in Enroot's .credentials is a command, which is not run here",
            hint="write the password itself, or use a credential helper in ~/.docker/config.json",
        )
    name = re.fullmatch(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?", password)
    return env.get(name[1], password) if name else password


@dataclass(frozen=True)
class DockerConfig:
    """The part of ~/.docker/config.json that is about us."""

    auths: Mapping[str, Credential | None] = field(default_factory=dict)
    helpers: Mapping[str, str] = field(default_factory=dict)
    store: str = ""


def parse_docker_config(text: str, path: Path) -> DockerConfig:
    if not text.strip():
        return DockerConfig()
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DalsegnoError(
            f"{path} is no JSON: {error}", hint="`docker login` writes it; mend it or remove it"
        ) from None
    value = value if isinstance(value, dict) else {}
    auths, helpers = value.get("auths"), value.get("credHelpers")
    return DockerConfig(
        {key: _auth(each) for key, each in auths.items()} if isinstance(auths, dict) else {},
        {key: str(each) for key, each in helpers.items()} if isinstance(helpers, dict) else {},
        str(value.get("credsStore") or ""),
    )


def _auth(value: object) -> Credential | None:
    if not isinstance(value, dict):
        return None
    if value.get("identitytoken"):
        return Credential("", "", str(value["identitytoken"]))
    try:
        user, colon, password = base64.b64decode(str(value.get("auth", ""))).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    if colon:
        return Credential(user, password.rstrip("\0"))
    return (
        Credential(str(value["username"]), str(value["password"])) if {"username", "password"} <= set(value) else None
    )
