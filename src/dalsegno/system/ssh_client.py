"""Connections to many hosts and the commands on them, in one event loop.

A host may be hostile. Therefore the size of its output is limited, and its text is escaped before it is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dalsegno.errors import CommandTimedOut, DalsegnoError
from dalsegno.printable import lines as printable_lines
from dalsegno.system.processes import Completed
from dalsegno.system.ssh_host import SILENT_INTERVALS, SshAddress, SshError, SshFault, SshSettings
from dalsegno.system.ssh_login import MAX_MESSAGE, HostKeyCheck, SshLogin, UserSettings, load_asyncssh, shown

if TYPE_CHECKING:
    import asyncssh

MAX_OUTPUT = 32 << 20  # limit in bytes on the two output streams of one command together
MAX_LINE = 1 << 20  # limit in bytes; a longer line is delivered in pieces
MAX_LINES = 200_000  # limit on the lines of one command
SESSIONS = 8  # sessions per connection; sshd's default limit is 10
SESSION_TIMEOUT_S = 60.0  # how long a command waits for a session on a host that permits fewer
SESSION_RETRY_S = 0.05
CHUNK = 1 << 16
MARGIN_S = 1.0  # a host ends a command this long after our own timeout
KILL_AFTER_S = 2
SUDO_TIMEOUT_S = 30.0
CLOSED_S = 2.0  # longest wait until sshd has closed the session of an ended command
LAST_LINES = 10
NOT_INSTALLED, TIMED_OUT = 127, 124

LineSink = Callable[[str], None]


@dataclass
class OpenConnection:
    """An open connection. `sudo` is the task that finds out how to run a command as root on the host."""

    connection: asyncssh.SSHClientConnection
    check: HostKeyCheck
    sessions: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SESSIONS))
    sudo: asyncio.Task[tuple[list[str], bytes]] | None = None

    @property
    def usable(self) -> bool:
        return not self.check.lost


class SshClient:
    """One connection per host and per jump host.

    A connection is opened when needed, and opened again if it was lost.
    """

    def __init__(self, addresses: Mapping[str, SshAddress], settings: SshSettings) -> None:
        self._addresses = addresses
        self._sudo_password = settings.sudo_password
        self._login = SshLogin(settings)
        self._errors: tuple[type[Exception], ...] = (load_asyncssh().Error, OSError)
        self._opened: dict[object, asyncio.Task[OpenConnection]] = {}
        self._running: set[asyncio.Task[Any]] = set()

    async def run(
        self, host: str, argv: Sequence[str], stdin: bytes, root: bool, timeout_s: float | None, sink: LineSink | None
    ) -> Completed:
        """Run one command to its end. The time limit does not include the login."""
        task = asyncio.current_task()
        assert task
        self._running.add(task)
        try:
            if host not in self._addresses:
                hint = "add the host below `ssh: hosts:`"
                raise SshError(host, SshFault.SETTINGS, "no address is known for this host", hint=hint)
            opened = await self._connection(self._addresses[host])
            prefix, first = await self._root(host, opened) if root else ([], b"")
            return await self._command(host, opened, [*prefix], argv, first + stdin, timeout_s, sink)
        finally:
            self._running.discard(task)

    async def close(self) -> None:
        """End all commands and close all connections."""
        pending = [each for each in (*self._running, *self._opened.values()) if not each.done()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        tasks = [each for each in self._opened.values() if not each.cancelled() and not each.exception()]
        connections = [each.result().connection for each in tasks]
        self._opened.clear()
        for connection in reversed(connections):  # jump hosts were opened first and are closed last
            connection.close()
        closing = asyncio.gather(*(each.wait_closed() for each in connections), return_exceptions=True)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(closing, 2)
        for connection in connections:
            connection.abort()

    # Running commands

    async def _command(
        self,
        host: str,
        opened: OpenConnection,
        prefix: Sequence[str],
        argv: Sequence[str],
        stdin: bytes,
        timeout_s: float | None,
        sink: LineSink | None,
    ) -> Completed:
        # `timeout` makes the host end the command even if the connection is lost. sshd does not do that.
        bound = ["timeout", "-k", str(KILL_AFTER_S), f"{timeout_s + MARGIN_S:g}"] if timeout_s else []
        output, started = CommandOutput(sink), time.monotonic()
        try:
            async with opened.sessions:
                process = await self._start(host, opened, shlex.join([*prefix, *bound, *argv]))
                opened.connection.set_keepalive(count_max=SILENT_INTERVALS)
                try:
                    await asyncio.wait_for(_talk(process, stdin, output), timeout_s)
                finally:
                    if process.exit_status is None:
                        with contextlib.suppress(*self._errors):
                            process.kill()
                    process.close()
                    with contextlib.suppress(asyncio.TimeoutError, *self._errors):
                        await asyncio.wait_for(process.wait_closed(), CLOSED_S)
        except (asyncio.TimeoutError, TimeoutError):
            last = output.last_lines().rpartition("\n")[2]
            hint = "the command hangs, or the host is overloaded" + (f"; its last line was: {last}" if last else "")
            raise CommandTimedOut(argv, timeout_s, host=host, hint=hint) from None
        except OutputLimitExceeded:
            what = f"`{argv[0]}` was stopped: it printed more than {MAX_OUTPUT >> 20} MiB, or {MAX_LINES:,} lines"
            hint = "run the command on the host and find out why it prints so much"
            raise SshError(host, SshFault.TOO_MUCH_OUTPUT, what, hint=hint, output=output.last_lines()) from None
        except self._errors as error:
            raise _cut(host, argv, output, shown(error)) from error
        if process.exit_status is None:
            raise _cut(host, argv, output, "")
        if timeout_s and process.exit_status == TIMED_OUT and time.monotonic() - started >= timeout_s:
            raise CommandTimedOut(argv, timeout_s, host=host, hint="the command hangs, or the host is overloaded")
        code = process.exit_status if process.exit_status >= 0 else 128 + _signal_number(process.exit_signal)
        stdout = bytes(output.stdout)
        return Completed(tuple(argv), code, _text(stdout), _text(bytes(output.stderr)), stdout)

    async def _start(self, host: str, opened: OpenConnection, command: str) -> asyncssh.SSHClientProcess[bytes]:
        """Start a command in its own session. Retry while sshd refuses one: it may still count sessions that have
        ended, or its `MaxSessions` may be below `SESSIONS`."""
        library = load_asyncssh()
        deadline = time.monotonic() + SESSION_TIMEOUT_S
        while True:
            try:
                return await opened.connection.create_process(
                    command, encoding=None, request_pty=False, send_env=None, env=None, x11_forwarding=False
                )
            except library.ChannelOpenError as error:
                if error.code != library.OPEN_CONNECT_FAILED or opened.check.lost:
                    raise
                if time.monotonic() > deadline:
                    what = f"sshd permitted no further session within {SESSION_TIMEOUT_S:.0f} s"
                    hint = "raise `MaxSessions` in the host's sshd_config, or end the sessions that hang there"
                    raise SshError(host, SshFault.REFUSED, what, hint=hint) from error
            await asyncio.sleep(SESSION_RETRY_S)

    # Running commands as root

    async def _root(self, host: str, opened: OpenConnection) -> tuple[list[str], bytes]:
        """Return the prefix for a command that runs as root, and the first line of its input."""
        if opened.sudo is None:
            opened.sudo = asyncio.ensure_future(self._find_sudo(host, opened))
        try:
            return await asyncio.shield(opened.sudo)
        except DalsegnoError:
            # Try again for the next command, because an administrator may have permitted sudo by then.
            opened.sudo = None
            raise

    async def _find_sudo(self, host: str, opened: OpenConnection) -> tuple[list[str], bytes]:
        """Find out with harmless commands how this login can run commands as root.

        With `-k`, sudo ignores a remembered password. It is then certain whether sudo reads a line from its input.
        Otherwise the password could reach the command, or sudo could read the command's input.
        """

        async def ask(*argv: str, stdin: bytes = b"") -> Completed:
            return await self._command(host, opened, [], argv, stdin, SUDO_TIMEOUT_S, None)

        if (await ask("id", "-u")).stdout.strip() == "0":
            return [], b""
        done = await ask("sudo", "-k", "-n", "--", "true")
        if done.exit_code == 0:
            return ["sudo", "-n", "--"], b""
        prefix, line = (
            ["sudo", "-k", "-S", "-p", "", "--"],
            self._sudo_password.encode(errors="surrogateescape") + b"\n",
        )
        if self._sudo_password and done.exit_code != NOT_INSTALLED:
            done = await ask(*prefix, "true", stdin=line)
            if done.exit_code == 0:
                return prefix, line
        user = opened.connection.get_extra_info("username", "")
        said = (done.stderr.strip().splitlines() or [f"exit code {done.exit_code}"])[-1]
        hint = "log in as root, permit sudo without password for this user, or set `sudo_password_file:` below `ssh:`"
        raise SshError(host, SshFault.NO_SUDO, f"user `{user}` cannot become root: {shown(said)}", hint=hint)

    # Opening connections

    async def _connection(
        self, address: SshAddress, tunnel: OpenConnection | None = None, hops: tuple[str, ...] = ()
    ) -> OpenConnection:
        """Return the connection to a host, or to the jump host `hops[-1]`. Open the connection if there is none."""
        task = self._opened.get((address, hops))
        if task is None or (task.done() and not _usable(task)):
            task = asyncio.ensure_future(self._open(address, tunnel, hops))
            # Mark the error as retrieved, so that asyncio does not log it. All waiting callers get it.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._opened[address, hops] = task
        return await asyncio.shield(task)

    async def _open(self, address: SshAddress, tunnel: OpenConnection | None, hops: tuple[str, ...]) -> OpenConnection:
        settings = self._login.read_settings(address)
        if not hops:
            tunnel = await self._open_hops(address, settings)
        connection, check = await self._login.open(address, settings, tunnel.connection if tunnel else None)
        return OpenConnection(connection, check)

    async def _open_hops(self, address: SshAddress, settings: UserSettings) -> OpenConnection | None:
        """Open the connections to the jump hosts, given as `user@host:port` or a list of these. Return the last one."""
        tunnel: OpenConnection | None = None
        hops: tuple[str, ...] = ()
        for hop in settings.jump.split(",") if settings.jump else ():
            hops = (*hops, hop)
            user, _, place = hop.rpartition("@")
            name, _, port = place.partition(":")
            through = SshAddress(f"jump host {hop}", name, user, int(port) if port.isdigit() else None, address.key)
            try:
                tunnel = await self._connection(through, tunnel, hops)
            except SshError as error:
                raise SshError(address.name, error.fault, error.what, hint=error.hint) from error
        return tunnel


class OutputLimitExceeded(Exception):
    """A command printed more than the limit."""


class CommandOutput:
    """The output of a running command. Complete lines of its standard output are passed to `sink` at once."""

    def __init__(self, sink: LineSink | None) -> None:
        self.stdout = bytearray()
        self.stderr = bytearray()
        self._sink = sink
        self._begun = 0  # offset of the last line, which is incomplete
        self._lines = 0

    def add(self, part: bytearray, data: bytes) -> None:
        part += data
        if len(self.stdout) + len(self.stderr) > MAX_OUTPUT:
            raise OutputLimitExceeded
        if part is self.stdout and self._sink:
            self._pass_lines(self._sink)

    def finish(self) -> None:
        """Pass on the last line if it has no line break."""
        if self._sink and self._begun < len(self.stdout):
            self._sink(_text(bytes(self.stdout[self._begun :])))

    def last_lines(self) -> str:
        """Return the last lines of the output, escaped for a terminal."""
        text = _text(bytes(self.stdout[-CHUNK:])) + _text(bytes(self.stderr[-CHUNK:]))
        return printable_lines("\n".join(line[:MAX_MESSAGE] for line in text.strip().split("\n")[-LAST_LINES:]))

    def _pass_lines(self, sink: LineSink) -> None:
        while (end := self.stdout.find(b"\n", self._begun)) >= 0:
            # Programs use \r to draw progress, so it also separates lines.
            for line in _text(bytes(self.stdout[self._begun : end]).rstrip(b"\r")).split("\n"):
                self._lines += 1
                if self._lines > MAX_LINES:
                    raise OutputLimitExceeded
                sink(line)
            self._begun = end + 1
        if len(self.stdout) - self._begun >= MAX_LINE:
            sink(_text(bytes(self.stdout[self._begun :])))
            self._begun = len(self.stdout)


async def _talk(process: asyncssh.SSHClientProcess[bytes], stdin: bytes, output: CommandOutput) -> None:
    """Send input to a command, collect its output, and wait for its end."""

    async def read(stream: asyncssh.SSHReader[bytes], part: bytearray) -> None:
        while data := await stream.read(CHUNK):
            output.add(part, data)

    sending = asyncio.ensure_future(_send(process, stdin))
    reading = [
        asyncio.ensure_future(read(stream, part))
        for stream, part in ((process.stdout, output.stdout), (process.stderr, output.stderr))
    ]
    try:
        await asyncio.gather(*reading)
        output.finish()
        await process.wait_closed()
    finally:
        for task in (sending, *reading):
            task.cancel()
        await asyncio.gather(sending, *reading, return_exceptions=True)


async def _send(process: asyncssh.SSHClientProcess[bytes], stdin: bytes) -> None:
    data = memoryview(stdin)
    with contextlib.suppress(OSError):  # the command may end before it has read its whole input
        for start in range(0, len(data), CHUNK):
            process.stdin.write(bytes(data[start : start + CHUNK]))
            await process.stdin.drain()
        process.stdin.write_eof()


def _usable(task: asyncio.Task[OpenConnection]) -> bool:
    return not task.cancelled() and task.exception() is None and task.result().usable


def _cut(host: str, argv: Sequence[str], output: CommandOutput, why: str) -> SshError:
    what = f"the connection was lost while `{argv[0]}` was running" + (f" ({why})" if why else "") + _last(output)
    hint = "check the host and its network, then run the command again: it continues where it stopped"
    return SshError(host, SshFault.CUT, what, hint=hint, output=output.last_lines())


def _last(output: CommandOutput) -> str:
    return "".join(f"\n  {line}" for line in output.last_lines().splitlines())


def _text(output: bytes) -> str:
    return output.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")


def _signal_number(found: tuple[str, bool, str, str] | None) -> int:
    return int(getattr(signal, f"SIG{found[0]}", 0)) if found else 0


def generate_key(comment: str) -> tuple[str, str]:
    """Return the private and the public part of a new key."""
    key = load_asyncssh().generate_private_key("ssh-ed25519", comment)
    return key.export_private_key().decode(), key.export_public_key().decode().strip()
