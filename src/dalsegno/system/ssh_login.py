"""Log in to a host with asyncssh, with the user's settings and a check of the host key.

The network may be hostile. A host key is accepted only if known_hosts has it for the requested name. Nothing prompts,
and neither the agent nor X11 is forwarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.errors import DalsegnoError, install_hint
from dalsegno.printable import one_line
from dalsegno.system.ssh_host import FIRST_SILENT_INTERVALS, SshAddress, SshError, SshFault, SshSettings

if TYPE_CHECKING:
    import asyncssh

SSH_PORT = 22
MAX_MESSAGE = 300  # limit in characters on a message from a host or the network

SSH_CONFIG = ("~/.ssh/config", "/etc/ssh/ssh_config")
USER_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
GLOBAL_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")

_CHECK_HOST = "check the address, the network, and that the host is running"


def load_asyncssh() -> Any:
    """Import asyncssh, which is an optional dependency."""
    try:
        import asyncssh
    except ImportError as error:
        raise DalsegnoError("hosts over SSH need the Python package `asyncssh`", hint=install_hint("ssh")) from error
    return asyncssh


@dataclass(frozen=True)
class UserSettings:
    """Settings for a host from the user's ssh configuration that asyncssh does not apply itself."""

    jump: str
    known_hosts: tuple[Path, ...]


@dataclass
class HostKeyCheck:
    """The number of keys that known_hosts has for a host, and the key that was presented but not accepted."""

    files: Sequence[Path]
    entries: asyncssh.SSHKnownHosts
    known: int = 0
    presented: str = ""  # type and fingerprint of the key
    verified: bool = False
    lost: bool = False

    def find(self, host: str, _: str, port: int | None) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Return the trusted keys, authorities and revoked keys for this name.

        As in ssh, the address that the name resolved to is ignored. Otherwise, an attacker who forges DNS answers could
        present any other host that is known by its address.
        """
        keys, authorities, revoked, *_rest = self.entries.match(host, "", port)
        self.known = len(keys) + len(authorities)
        return keys, authorities, revoked


class SshLogin:
    """Opens connections that share the same settings."""

    def __init__(self, settings: SshSettings) -> None:
        self._settings = settings
        self._asyncssh = load_asyncssh()
        # ValueError is raised for errors in the user's configuration or keys.
        self._errors = (self._asyncssh.Error, OSError, asyncio.TimeoutError, ValueError)
        self._at_once = asyncio.Semaphore(settings.limit)
        self._entries: dict[tuple[Path, ...], asyncssh.SSHKnownHosts] = {}

    def read_settings(self, address: SshAddress) -> UserSettings:
        """Read the user's ssh configuration for a host."""
        try:
            found = self._asyncssh.SSHClientConnectionOptions(host=address.address, client_keys=None, **_place(address))
        except (self._asyncssh.Error, OSError, ValueError) as error:
            raise self._explain(address, error, None) from error
        user, everywhere = (found.config.get(f"{kind}KnownHostsFile", ()) for kind in ("User", "Global"))
        files = [*(user or USER_KNOWN_HOSTS), *(everywhere or GLOBAL_KNOWN_HOSTS)]
        jump = address.jump or (found.tunnel if isinstance(found.tunnel, str) else "")
        return UserSettings(jump, tuple(Path(each).expanduser() for each in files))

    async def open(
        self, address: SshAddress, settings: UserSettings, tunnel: asyncssh.SSHClientConnection | None
    ) -> tuple[asyncssh.SSHClientConnection, HostKeyCheck]:
        """Connect and log in, directly or through the connection to a jump host."""
        files = (self._settings.known_hosts,) if self._settings.known_hosts else settings.known_hosts
        if files not in self._entries:
            self._entries[files] = _read_known_hosts(self._asyncssh, files)
        check = HostKeyCheck(files, self._entries[files])
        try:
            async with self._at_once:
                return await self._connect(address, tunnel, check), check
        except self._errors as error:
            raise self._explain(address, error, check) from error

    async def _connect(
        self, address: SshAddress, tunnel: asyncssh.SSHClientConnection | None, check: HostKeyCheck
    ) -> asyncssh.SSHClientConnection:
        options = {"tunnel": tunnel, **_place(address), **self._options(address, check)}
        try:
            return await self._asyncssh.connect(address.address, **options)  # type: ignore[no-any-return]
        # If the host closes the connection, the timing determines which of these two is raised.
        except (self._asyncssh.DisconnectError, ConnectionResetError):
            if not check.known or check.verified or check.presented:
                raise
        # The first attempt offered only the key types that known_hosts has for the host. When all types are offered,
        # the host presents its key, which is then refused as changed.
        check.lost = False
        return await self._asyncssh.connect(  # type: ignore[no-any-return]
            address.address, **options, server_host_key_algs="default"
        )

    def _options(self, address: SshAddress, check: HostKeyCheck) -> dict[str, Any]:
        base = self._asyncssh.SSHClient

        class Client(base):  # type: ignore[misc, valid-type]
            def validate_host_public_key(self, host: str, addr: str, port: int, key: Any) -> bool:
                check.presented = f"{key.get_algorithm()} {key.get_fingerprint()}"
                return False

            def begin_auth(self, username: str) -> None:
                check.verified = True

            def connection_lost(self, exc: Exception | None) -> None:
                check.lost = True

        keys: dict[str, Any] = {"client_keys": [str(Path(address.key).expanduser())]} if address.key else {}
        return {
            **keys,
            "client_factory": Client,
            "known_hosts": check.find,
            "x509_trusted_certs": None,
            "gss_kex": False,  # GSS key exchange would replace the check of the host key
            "password_auth": False,
            "kbdint_auth": False,
            "ignore_encrypted": True,  # skip encrypted key files, because the agent may hold the decrypted key
            "agent_forwarding": False,
            "compression_algs": ["none"],  # a hostile host could send a small message that expands to a huge one
            "connect_timeout": self._settings.connect_timeout_s,
            "keepalive_interval": self._settings.keepalive_s,
            "keepalive_count_max": FIRST_SILENT_INTERVALS,
        }

    def _explain(self, address: SshAddress, error: Exception, check: HostKeyCheck | None) -> SshError:
        """Return an error that explains what is wrong with the connection to a host."""
        asyncssh = self._asyncssh
        at = f"{address.address}:{address.port or SSH_PORT}" + (f" through {address.jump}" if address.jump else "")

        def fault(kind: SshFault, what: str, hint: str) -> SshError:
            return SshError(address.name, kind, what, hint=hint)

        if isinstance(error, asyncssh.HostKeyNotVerifiable) and check:
            return _host_key_fault(address, error, check)
        if isinstance(error, asyncssh.PermissionDenied):
            key = f"the key `{address.key}`" if address.key else "your key"
            who = f" as user `{address.user}`" if address.user else ""
            hint = f"add {key} to ~/.ssh/authorized_keys there, load it with `ssh-add`, or set `user:` and `key:`"
            return fault(SshFault.LOGIN_REFUSED, f"{at} refuses the login{who}", hint)
        if isinstance(error, asyncssh.ChannelOpenError):
            what = f"the jump host cannot reach {address.address}:{address.port or SSH_PORT}: {shown(error)}"
            return fault(SshFault.UNREACHABLE, what, "check the address and the network behind the jump host")
        if isinstance(error, ConnectionRefusedError):
            hint = "start sshd on the host, or correct `port:` below `ssh:`"
            return fault(SshFault.REFUSED, f"nothing listens at {at}", hint)
        if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
            what = f"{at} does not answer within {self._settings.connect_timeout_s:.0f} s"
            return fault(SshFault.UNREACHABLE, what, _CHECK_HOST)
        if isinstance(error, (asyncssh.DisconnectError, ConnectionResetError, BrokenPipeError)):
            lost = isinstance(error, (asyncssh.ConnectionLost, ConnectionError))
            kind = SshFault.CUT if lost else SshFault.PROTOCOL
            hint = f"try `ssh -v {address.address}`, and look at sshd's log on the host"
            return fault(kind, f"no SSH session with {at}: {shown(error)}", hint)
        if isinstance(error, OSError) and not error.filename:
            return fault(SshFault.UNREACHABLE, f"{at} cannot be reached: {shown(error)}", _CHECK_HOST)
        hint = "correct `key:` below `ssh:`, or ~/.ssh/config"
        return fault(SshFault.SETTINGS, f"the SSH settings cannot be used: {shown(error)}", hint)


def _place(address: SshAddress) -> dict[str, Any]:
    config = [str(path) for each in SSH_CONFIG if (path := Path(each).expanduser()).is_file()]
    port = {"port": address.port} if address.port else {}
    return {"config": config, **port, **({"username": address.user} if address.user else {})}


def _read_known_hosts(library: Any, files: Iterable[Path]) -> asyncssh.SSHKnownHosts:
    """Read the files that exist. Like ssh, ignore damaged lines."""
    entries: asyncssh.SSHKnownHosts = library.import_known_hosts("")
    for path in files:
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                entries.load(line)
    return entries


def _host_key_fault(address: SshAddress, error: Exception, check: HostKeyCheck) -> SshError:
    key = f" {check.presented}" if check.presented else f": {shown(error)}"
    files = ", ".join(map(str, check.files))
    if check.known:
        what = f"the host key has changed, or another machine answers. It presents{key}, which is not in {files}"
        return SshError(address.name, SshFault.HOST_KEY_CHANGED, what, hint=_changed_hint(address, check))
    port = f"-p {address.port} " if address.port else ""
    get = f"ssh -J {address.jump}" if address.jump else "ssh-keyscan"
    hint = (
        f"get the key with `{get} {port}{address.address}`, compare its fingerprint with the one on the host's console "
        f"(`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub`), then add it to {check.files[0]}"
    )
    return SshError(address.name, SshFault.HOST_KEY_UNKNOWN, f"unknown host key{key}", hint=hint)


def _changed_hint(address: SshAddress, check: HostKeyCheck) -> str:
    place = f"[{address.address}]:{address.port}" if address.port not in (None, SSH_PORT) else address.address
    return (
        "somebody may intercept the connection. If the host was installed again, check the fingerprint on its console, "
        f"then remove the old key with `ssh-keygen -f {check.files[0]} -R {shlex.quote(place)}` and add the new one"
    )


def shown(said: object) -> str:
    """Return the text of a host or the network on one line, with limited length and escaped for a terminal."""
    text = " ".join(str(said).split())
    return one_line(text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} …")
