"""A server process that has imported the command line and forks a child for each command.

Cluster tests run thousands of commands. Starting Python and importing the libraries takes 0.15 to 0.5 s of CPU each
time, often more than the command itself. The commands in `WARM` are therefore forked from this process. All other
commands are started as users start them, and so are the commands of the pages in docs/ and of users other than root. A
test that starts `dalsegno` in another way, such as without a capability, has only the commands in `READING` forked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from dalsegno.wire.peer import uid_of

CLONE = Path(__file__).parents[2]
READING = {"shell", "status", "runs", "nodes", "events", "logs", "why", "ls"}
WARM = READING | {
    "automation", "cancel", "down", "group", "health", "inject", "monitor", "plan", "run", "storage", "submit", "up",
    "user", "validate", "web",
}  # fmt: skip
LAZY_IMPORTS = (  # modules that commands import late
    "cluster", "inject.faults", "recovery.client", "recovery.runs.run_records", "runs.status", "runs.submit.prepare",
    "spec.load", "spec.resolve", "targets.local",
)  # fmt: skip
MAX_REQUEST_BYTES = 1 << 20


class WarmCli:
    """The client. It starts the server on first use, once in each process that runs tests."""

    def __init__(self) -> None:
        self.owner = 0
        self.address = ""
        self.process: subprocess.Popen[bytes] | None = None

    def run(
        self, args: Sequence[str], env: Mapping[str, str], cwd: Path, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run `dalsegno ARGS...` and return its exit code and output, as `subprocess.run` does."""
        self._start()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, self._connected() as connection:
            request = json.dumps({"args": list(args), "env": dict(env), "cwd": str(cwd)}).encode()
            socket.send_fds(connection, [request], [out.fileno(), err.fileno()])
            pid = int(connection.recv(32))
            connection.settimeout(timeout_s)
            try:
                code = int(connection.recv(32))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(list(args), timeout_s) from None
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(list(args), code, *texts)

    def _start(self) -> None:
        if self.owner == os.getpid():  # a forked lane starts its own server
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind("")  # the kernel chooses an unused abstract name
        listener.listen(64)
        self.owner, self.address = os.getpid(), listener.getsockname()
        argv = [sys.executable, "-m", "tests.cluster.warm_cli", str(listener.fileno())]
        self.process = subprocess.Popen(argv, cwd=CLONE, pass_fds=[listener.fileno()], stdin=subprocess.PIPE)
        listener.close()

    def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(self.address)
        return connection


def serve(listener: socket.socket) -> None:
    """Fork for each request until the process that runs the tests has ended; report each child's PID and exit code."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(listener, selectors.EVENT_READ)
        waiting.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is sys.stdin:
                    return
                if key.data is not None:
                    pid, connection = key.data
                    _, status = os.waitpid(pid, 0)
                    with contextlib.suppress(OSError):  # the test no longer waits
                        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
                    connection.close()
                    waiting.unregister(key.fileobj)
                    os.close(key.fd)
                    continue
                connection, _ = listener.accept()
                if uid_of(connection) != os.geteuid():  # abstract names have no permissions, so anyone can connect
                    connection.close()
                    continue
                request, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 2)
                pid = os.fork()
                if pid == 0:
                    run(json.loads(request), fds)
                for fd in fds:
                    os.close(fd)
                connection.send(str(pid).encode())
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))


def run(request: dict[str, object], outputs: list[int]) -> None:
    """Run the command in this child, with the folder and environment of the request, and exit."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    null = os.open(os.devnull, os.O_RDONLY)
    for number, fd in enumerate([null, *outputs]):
        os.dup2(fd, number)
    os.closerange(3, 1024)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    sys.argv = ["dalsegno", *request["args"]]
    from dalsegno.cli.main import main

    main()
    sys.exit()


def import_commands() -> None:
    """Import what the commands import, and exclude these objects from garbage collection in every child."""
    from dalsegno.cli.main import find_module

    for name in WARM:
        importlib.import_module(find_module(name))
    for name in LAZY_IMPORTS:
        importlib.import_module(f"dalsegno.{name}")
    gc.freeze()


if __name__ == "__main__":
    import_commands()
    serve(socket.socket(fileno=int(sys.argv[1])))
