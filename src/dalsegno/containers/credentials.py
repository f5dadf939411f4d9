"""Credentials for registries, from the files of Enroot, Docker, Podman and Skopeo, and from Docker's helpers.

A registry gets only its own password:

- For basic authentication, the credential that is stored for the registry itself is sent.
- For a token, the same credential is sent to the token server (the realm) that the registry names, if registry and
  realm belong together: the same host, a pair in `KNOWN_REALMS`, hosts in one domain, or two hosts for which the user
  stored the same credential.
- A credential that is stored only for the token server, as in Enroot's files, is used only for the registries in
  `KNOWN_REALMS`. Otherwise a registry that names a foreign token server would get that server's tokens.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import ipaddress
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from dalsegno.errors import DalsegnoError
from dalsegno.image_name import DOCKER_HUB
from dalsegno.system.ownership import trusted_owners
from dalsegno.system.processes import Runner

KNOWN_REALMS: Mapping[str, tuple[str, ...]] = {
    DOCKER_HUB: ("auth.docker.io",),
    "nvcr.io": ("authn.nvidia.com",),
    "registry.gitlab.com": ("gitlab.com",),
}
_HUB_KEYS = ("https://index.docker.io/v1/", "docker.io", "index.docker.io", "auth.docker.io", DOCKER_HUB)
_HUB_MACHINES = ("docker.io", "index.docker.io")
_HELPER = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MACHINE = re.compile(r"(\[[0-9a-f:]+\]|[^:]+)(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"https": 443, "http": 80}
_MAX_BYTES = 1 << 20  # larger credentials files are ignored


@dataclass(frozen=True)
class RegistryServer:
    """The scheme, host and port of a server."""

    scheme: str
    host: str  # host name in lower case; an IPv6 address without its brackets
    port: int

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if _DEFAULT_PORTS.get(self.scheme) == self.port else f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False

    def is_same_host(self, other: RegistryServer) -> bool:
        return self.host == other.host or (self.is_loopback and other.is_loopback)


def server_of(url: str) -> RegistryServer | None:
    """Return the server in an http or https URL; None if the URL contains a user name or is malformed."""
    try:
        parts = urlsplit(url)
        port = _DEFAULT_PORTS.get(parts.scheme, 0) if parts.port is None else parts.port
    except ValueError:
        return None
    plain = url.isascii() and url.isprintable() and not set(url) & set(" \\") and "@" not in parts.netloc
    if not plain or parts.scheme not in _DEFAULT_PORTS or not parts.hostname or not port:
        return None
    return RegistryServer(parts.scheme, parts.hostname.lower(), port)


@dataclass(frozen=True)
class Credential:
    """A user and a password, or a token in place of both."""

    user: str
    password: str = field(repr=False)
    identity_token: str = field(default="", repr=False)


class UnknownRealm(DalsegnoError):
    """Raised if a registry wants its password sent to a server that is not known to belong to the registry."""


@dataclass(frozen=True)
class CredentialFinder:
    """Finds credentials in the environment, the home folder and helper programs."""

    env: Mapping[str, str]
    home: Path
    runner: Runner
    unused: list[str] = field(default_factory=list)  # why credentials were not used, for the error message

    def for_registry(self, registry: RegistryServer, user: str = "") -> Credential | None:
        """Return the registry's own credential, for basic authentication."""
        return _first(self._stored_for(registry), user)

    def for_realm(self, registry: RegistryServer, realm: RegistryServer, user: str = "") -> Credential | None:
        """Return the credential to send to the realm. Raise UnknownRealm if the realm is not known to belong to the
        registry."""
        with_tls = (registry.scheme, realm.scheme) == ("https", "https")
        pair = with_tls and realm.host in KNOWN_REALMS.get(registry.host, ())
        found = _first(self._stored_for(registry, realm if pair else None), user)
        if found is None or pair or registry.is_same_host(realm) or are_of_one_domain(registry, realm):
            return found
        if found in self._static(realm, _docker_keys(realm)):
            return found
        raise UnknownRealm(
            f"{registry.address} asks to send its password to {realm.address}, which may belong to someone else",
            hint=f"if {realm.address} is the token server of {registry.address}, store the same login and password "
            f"for it: `machine {realm.address} login USER password WORD` in {self._enroot_file()}",
        )

    def _stored_for(self, registry: RegistryServer, realm: RegistryServer | None = None) -> Iterator[Credential]:
        """Yield the credentials stored for a registry or, in Enroot's file only, for its token server."""
        hub = [RegistryServer("https", host, 443) for host in _HUB_MACHINES if registry.host == DOCKER_HUB]
        yield from self._in_netrc([registry, *hub, *([realm] if realm else [])])
        for path in self._docker_files():
            yield from self._of_docker(path, _docker_keys(registry))

    def _in_netrc(self, servers: list[RegistryServer]) -> Iterator[Credential]:
        for machine, credential in parse_netrc(self._read(self._enroot_file())):
            if any(_is_machine(machine, server) for server in servers):
                yield _expanded(credential, machine, self.env)

    def _static(self, server: RegistryServer, keys: tuple[str, ...]) -> Iterator[Credential]:
        """Yield a server's credentials from files. Docker's helper programs are not run, because they might open a
        window.
        """
        yield from self._in_netrc([server])
        for path in self._docker_files():
            auths = parse_docker_config(self._read(path), path).auths
            yield from (found for key in keys if (found := auths.get(key)))

    def _read(self, path: Path) -> str:
        """Return the text of a credentials file; "" if it is missing or `_why_refused` gives a reason not to read
        it."""
        try:
            with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as file:
                if why := _why_refused(os.fstat(file.fileno()), self.env):
                    self._note(f"{path} was not read because it {why}")
                    return ""
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except (OSError, UnicodeDecodeError) as error:
            raise DalsegnoError(
                f"{path} cannot be read: {error}", hint="check the permissions of this credentials file"
            ) from error

    def _note(self, why: str) -> None:
        self.unused.extend({why}.difference(self.unused))

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
        value = parse_docker_config(self._read(path), path)
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
            done = self.runner.run([program, "get"], stdin=key, env=self.env, timeout_s=60)
        except DalsegnoError:  # not fatal, because the registry may need no credential
            self._note(f"{program} is configured, but not installed on this machine")
            return
        try:
            value = json.loads(done.stdout) if done.exit_code == 0 else {}
        except (ValueError, RecursionError):
            value = {}
        if isinstance(value, dict) and value.get("Secret"):
            user, secret = str(value.get("Username", "")), str(value["Secret"])
            yield Credential("", "", secret) if user == "<token>" else Credential(user, secret)


def _first(found: Iterator[Credential], user: str) -> Credential | None:
    return next((each for each in found if each.identity_token or not user or each.user == user), None)


def are_of_one_domain(registry: RegistryServer, realm: RegistryServer) -> bool:
    """Return whether both servers use TLS in one domain: `registry.example.org` with `auth.example.org` or with
    `example.org`."""
    if (registry.scheme, realm.scheme) != ("https", "https"):
        return False
    above = {host: host.partition(".")[2] for host in (registry.host, realm.host)}
    names = [{host} | ({parent} if "." in parent else set()) for host, parent in above.items() if not _is_ip(host)]
    return len(names) == 2 and bool(names[0] & names[1])


def _is_ip(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _is_machine(machine: str, server: RegistryServer) -> bool:
    """Return whether a `machine` entry in Enroot's file applies to this server.

    With TLS, an entry without a port matches all ports, as in curl. Without TLS, it matches only port 80, because any
    user of that host could listen on another port.
    """
    found = _MACHINE.fullmatch(machine.lower())
    if found is None or found[1].strip("[]") != server.host:
        return False
    if found[2]:
        return int(found[2]) == server.port
    return server.scheme == "https" or server.port == _DEFAULT_PORTS["http"]


def _why_refused(about: os.stat_result, env: Mapping[str, str]) -> str:
    """Return why an open file is not accepted as a credentials file; "" if it is accepted."""
    if not stat.S_ISREG(about.st_mode) or about.st_size > _MAX_BYTES:
        return "is not a regular file" if about.st_size <= _MAX_BYTES else f"is longer than {_MAX_BYTES >> 20} MiB"
    if about.st_uid not in trusted_owners(env):
        return f"belongs to another user (uid {about.st_uid})"
    return "can be written by everyone" if about.st_mode & stat.S_IWOTH else ""


def _docker_keys(server: RegistryServer) -> tuple[str, ...]:
    """Return the JSON keys under which Docker's files can list a server. Keys with `https://` are only for TLS."""
    if server.host == DOCKER_HUB:
        return _HUB_KEYS
    with_tls = (f"https://{server.address}", f"https://{server.address}/v2/") if server.scheme == "https" else ()
    explicit = () if server.address.endswith(f":{server.port}") else (f"{server.address}:{server.port}",)
    return (server.address, *explicit, *with_tls)


def parse_netrc(text: str) -> list[tuple[str, Credential]]:
    """Parse entries `machine HOST login USER password WORD`, each on one line or several; skip incomplete ones."""
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
    return [(machine, Credential(each["login"], each["password"])) for machine, each in whole]


def _expanded(credential: Credential, machine: str, env: Mapping[str, str]) -> Credential:
    """Replace a password `$NAME` by the value of that environment variable, if it is set. Raise DalsegnoError if the
    password is a command."""
    password = credential.password
    if password.startswith(("$(", "`")):
        raise DalsegnoError(
            f"the password for {machine} in Enroot's .credentials is a command, which Dal Segno does not run",
            hint="write the password itself, or use a credential helper in ~/.docker/config.json",
        )
    name = re.fullmatch(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?", password)
    return Credential(credential.user, env.get(name[1], password)) if name else credential


@dataclass(frozen=True)
class DockerConfig:
    """The credentials in ~/.docker/config.json."""

    auths: Mapping[str, Credential | None] = field(default_factory=dict)
    helpers: Mapping[str, str] = field(default_factory=dict)
    store: str = ""


def parse_docker_config(text: str, path: Path) -> DockerConfig:
    if not text.strip():
        return DockerConfig()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DalsegnoError(
            f"{path} is not valid JSON: {error}", hint="fix or remove it; `docker login` writes a new one"
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
