"""The agent's interface to the warm parent: start it, request forks, receive its reports, and kill descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dalsegno.runs.agent.evidence import children, descendants
from dalsegno.wire.frames import FileReader, Message, send

_PACKAGES = str(Path(__file__).parents[3])
_START = "import sys; sys.path.insert(0, sys.argv[1]); from dalsegno.runs.agent.warm import start; start(sys.argv[1:])"


class WarmParent:
    """One warm parent. `sock` is readable when the parent has sent something or has exited."""

    def __init__(
        self, python: str, modules: Sequence[str], env: Mapping[str, str], cwd: str, keep_stdin: bool = False
    ) -> None:
        self.sock, other = socket.socketpair()
        self.sock.set_inheritable(False)
        self._reader = FileReader()
        argv = [python, "-u", "-c", _START, _PACKAGES, str(other.fileno()), *modules]
        try:
            # Python runs without -I, because the user's PYTHONPATH and site folders apply to workers. The parent
            # gets its own session, so that Ctrl-C at a terminal reaches only the agent, which signals the workers.
            self._process = subprocess.Popen(
                argv, env=dict(env), cwd=cwd, pass_fds=[other.fileno()], start_new_session=True,
                stdin=None if keep_stdin else subprocess.DEVNULL,
            )  # fmt: skip
        except OSError:
            self.sock.close()
            raise
        finally:
            other.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, task: Message, files: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # if the parent has exited, `receive` reports that
            send(self.sock, {"fork": task, "files": len(files)}, files)

    def receive(self, wait: bool = False) -> list[Message] | None:
        """Return the messages that the parent has sent; None if it has exited."""
        try:
            return self._reader.receive(self.sock, wait)
        except TimeoutError:
            return []
        except OSError:
            return None

    def end(self) -> None:
        """Kill the parent. Its workers die with it, and the agent adopts the workers' orphans."""
        self._process.kill()
        self._process.wait()
        self.sock.close()


def plain_parent(env: Mapping[str, str], cwd: str, keep_stdin: bool = False) -> WarmParent:
    """Start a parent that imports nothing, in the agent's Python. Its workers are separate programs."""
    return WarmParent(sys.executable, (), env, cwd, keep_stdin)


def kill_groups(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def kill_below(keep: Sequence[int], timeout_s: float = 5.0) -> list[int]:
    """Kill all descendants of this process, in any session, except those in `keep`. Return the PIDs that survive."""
    until = time.monotonic() + timeout_s
    while True:
        _reap(keep)
        left = [pid for pid in descendants(os.getpid()) if pid not in keep]
        if not left or time.monotonic() > until:
            return left
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _reap(keep: Sequence[int]) -> None:
    """Reap adopted orphans, except the processes in `keep`, which their owner reaps."""
    for pid in children(os.getpid()):
        if pid not in keep:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
