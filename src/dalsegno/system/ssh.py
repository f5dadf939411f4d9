"""Run commands on hosts over SSH: the contract, a fake for tests, and the real connections.

`SshConnections` is used from ordinary threads. It keeps one connection per host, opened when it is first needed, in an
event loop of its own thread (`system/ssh_client.py`).
"""

from __future__ import annotations

import asyncio
import os
import shlex
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypeVar

from dalsegno.errors import DalsegnoError
from dalsegno.system.processes import Completed
from dalsegno.system.ssh_host import (
    AT_ONCE,
    CONNECT_TIMEOUT_S,
    KEEPALIVE_S,
    SshAddress,
    SshError,
    SshFault,
    SshSettings,
)

if TYPE_CHECKING:
    from dalsegno.system.ssh_client import SshClient

__all__ = [
    "FakeHostRunner",
    "HostCall",
    "HostRunner",
    "SshAddress",
    "SshConnections",
    "SshError",
    "SshFault",
    "client_argv",
    "read_password_file",
]

T = TypeVar("T")
OnLine = Callable[[str], None]

MAX_PASSWORD = 1024


class HostRunner(Protocol):
    """Runs commands on hosts, which are identified by name. A failed command is a result, not an exception."""

    def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        root: bool = False,
        timeout_s: float | None = None,
        on_line: OnLine | None = None,
    ) -> Completed:
        """Run one command to its end.

        `on_line` is called with each line of its standard output, in the calling thread.
        """
        ...

    def each(self, hosts: Iterable[str], work: Callable[[str], T]) -> dict[str, T | DalsegnoError]:
        """Call `work` for many hosts at once.

        If `work` fails for a host, the error is that host's result, and the other hosts continue.
        """
        ...


@dataclass(frozen=True)
class HostCall:
    """A command that a fake runner received."""

    host: str
    argv: tuple[str, ...]
    stdin: bytes = b""
    root: bool = False


@dataclass
class FakeHostRunner:
    """A host runner for tests that answers from a function and records the calls.

    If an answer is an error, it is raised.
    """

    answer: Callable[[HostCall], Completed | DalsegnoError | str]
    calls: list[HostCall] = field(default_factory=list)

    def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        root: bool = False,
        timeout_s: float | None = None,
        on_line: OnLine | None = None,
    ) -> Completed:
        call = HostCall(host, tuple(argv), stdin, root)
        self.calls.append(call)
        answer = self.answer(call)
        if isinstance(answer, DalsegnoError):
            raise answer
        done = Completed(call.argv, 0, answer) if isinstance(answer, str) else answer
        for line in done.stdout.splitlines() if on_line else ():
            assert on_line
            on_line(line)
        return done

    def each(self, hosts: Iterable[str], work: Callable[[str], T]) -> dict[str, T | DalsegnoError]:
        found: dict[str, T | DalsegnoError] = {}
        for host in hosts:
            try:
                found[host] = work(host)
            except DalsegnoError as error:
                found[host] = error
        return found


class SshConnections:
    """Connections to many hosts. Use it as a context manager, which closes all connections at the end."""

    def __init__(
        self,
        addresses: Sequence[SshAddress],
        *,
        limit: int = AT_ONCE,
        known_hosts: Path | None = None,
        sudo_password: str = "",
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        """Set up the connections, but open none yet.

        `known_hosts` replaces the files of the user's ssh configuration. `limit` is the maximum number of hosts in
        `each`, and of concurrent logins.
        """
        self._addresses = {each.name: each for each in addresses}
        self._settings = SshSettings(limit, known_hosts, sudo_password, connect_timeout_s, keepalive_s)
        self._lock = threading.Lock()
        self._client: SshClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def __enter__(self) -> SshConnections:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        root: bool = False,
        timeout_s: float | None = None,
        on_line: OnLine | None = None,
    ) -> Completed:
        """Run one command to its end. `root` uses sudo unless the login is root itself."""
        lines: SimpleQueue[str | None] = SimpleQueue()
        with self._lock:
            client, loop = self._start()
            work = client.run(host, argv, stdin, root, timeout_s, lines.put if on_line else None)
            running = asyncio.run_coroutine_threadsafe(work, loop)
        running.add_done_callback(lambda _: lines.put(None))
        try:
            while (line := lines.get()) is not None:
                assert on_line
                on_line(line)
            return running.result()
        except CancelledError:
            raise SshError(host, SshFault.CUT, "interrupted", hint="run the command again") from None
        finally:
            running.cancel()  # has an effect only after Ctrl-C, or after an error in `on_line`

    def each(self, hosts: Iterable[str], work: Callable[[str], T]) -> dict[str, T | DalsegnoError]:
        """Call `work` for each host in threads, at most `limit` at once.

        If `work` fails for a host, the error is that host's result.
        """

        def attempt(host: str) -> T | DalsegnoError:
            try:
                return work(host)
            except DalsegnoError as error:
                return error

        pool = ThreadPoolExecutor(self._settings.limit, thread_name_prefix="host")
        try:
            started = {host: pool.submit(attempt, host) for host in hosts}
            for done in as_completed(started.values()):
                done.result()  # raises any error other than DalsegnoError, which ends the work on all hosts
            return {host: done.result() for host, done in started.items()}
        except BaseException:
            self.close()  # ends the commands in progress, so that their threads end too
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Close all connections. Commands in progress fail."""
        with self._lock:
            self._closed = True
            client, loop, thread = self._client, self._loop, self._thread
            self._client = self._loop = self._thread = None
        if client is None or loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(client.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _start(self) -> tuple[SshClient, asyncio.AbstractEventLoop]:
        if self._closed:
            raise DalsegnoError("the connections to the hosts are closed", hint="run the command again")
        if self._client is None or self._loop is None:
            from dalsegno.system.ssh_client import SshClient  # imported here, because it needs asyncssh

            self._client = SshClient(self._addresses, self._settings)
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="ssh", daemon=True)
            self._thread.start()
        return self._client, self._loop


def read_password_file(path: Path) -> str:
    """Return the first line of a file that only its owner can read and that only this user or root can have written."""
    hint = f"write the password to it as its only line, then run `chmod 600 {shlex.quote(str(path))}`"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise DalsegnoError(f"the password file {path} cannot be read: {error.strerror}", hint=hint) from error
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid not in (0, os.geteuid()):
            raise DalsegnoError(f"the password file {path} is open to other users", hint=hint)
        line = file.readline(MAX_PASSWORD).rstrip(b"\r\n")
    if not line or b"\0" in line:
        raise DalsegnoError(f"the password file {path} has no password", hint=hint)
    return line.decode(errors="surrogateescape")


def make_key_pair(comment: str) -> tuple[str, str]:
    """Return a new key pair without a passphrase: the private key file's text, and the public key as one line."""
    from dalsegno.system.ssh_client import generate_key  # imported here, because it needs asyncssh

    return generate_key(comment)


def client_argv(
    address: SshAddress, command: Sequence[str] = (), *, known_hosts: Path | None = None, terminal: bool = False
) -> list[str]:
    """Return the `ssh` command with which a person opens a shell or runs a command on a host.

    With a terminal, ssh asks before it accepts an unknown host key; otherwise it refuses the key. A jump host gets the
    same login key as the host, which `ssh -J` would not do.
    """
    # Do not forward the agent or the display
    trust = ["-a", "-x", "-o", f"StrictHostKeyChecking={'ask' if terminal else 'yes'}"]
    if known_hosts:
        trust += ["-o", f"UserKnownHostsFile={_literal(str(known_hosts))}"]
    key = ["-i", _literal(os.path.expanduser(address.key))] if address.key else []
    where = [*(["-l", address.user] if address.user else []), *(["-p", str(address.port)] if address.port else [])]
    if address.jump:
        place, _, port = address.jump.partition(":")
        proxy = _literal(shlex.join(["ssh", *trust, *key, *(["-p", port] if port else [])]))
        where += ["-o", f"ProxyCommand={proxy} -W '[%h]:%p' -- {shlex.quote(place)}"]
    shown = ["-t"] if terminal and command else []
    return ["ssh", *trust, *key, *where, *shown, "--", address.address, *([shlex.join(command)] if command else [])]


def _literal(text: str) -> str:
    """Escape the characters in the text that ssh would expand."""
    return text.replace("%", "%%")
