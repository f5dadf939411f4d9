"""The agent's hold on its warm parent: starting it, having it fork, hearing of ends, killing all that is below it."""

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

from dalsegno.runs.agent.evidence import below, children
from dalsegno.wire.frames import FileReader, Message, send

_PACKAGES = str(Path(__file__).parents[3])
_START = "import sys; sys.path.insert(0, sys.argv[1]); from dalsegno.runs.agent.warm import start; start(sys.argv[1:])"


class WarmParent:
    """One such process. `sock` is readable when it has something to say; `receive` gives None when it is gone."""

    def __init__(
        self, python: str, modules: Sequence[str], env: Mapping[str, str], cwd: str, keep_stdin: bool = False
    ) -> None:
        self.sock, other = socket.socketpair()
        self.sock.set_inheritable(False)
        self._reader = FileReader()
        argv = [python, "-u", "-c", _START, _PACKAGES, str(other.fileno()), *modules]
        try:
            # Not -I: the user's PYTHONPATH and site folders are the workers' own. A session of its own: at a terminal
            # Ctrl-C reaches the agent alone, which tells the workers.
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
        with contextlib.suppress(OSError):  # it is gone; that is heard as its end
            send(self.sock, {"fork": task, "files": len(files)}, files)

    def receive(self, wait: bool = False) -> list[Message] | None:
        """What it has said; nothing, if it has not and is not waited for. None when it is gone."""
        try:
            return self._reader.receive(self.sock, wait)
        except TimeoutError:
            return []
        except OSError:
            return None

    def end(self) -> None:
        """Kill it; its workers die with it, and what they leave behind becomes ours."""
        self._process.kill()
        self._process.wait()
        self.sock.close()


def plain_parent(env: Mapping[str, str], cwd: str, keep_stdin: bool = False) -> WarmParent:
    """One that has imported nothing, in our own Python: its workers are programs that it becomes."""
    return WarmParent(sys.executable, (), env, cwd, keep_stdin)


def kill_groups(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def kill_below(keep: Sequence[int], timeout_s: float = 5.0) -> list[int]:
    """Kill every process below ours but those to keep, whatever session it made itself; gives those that stay."""
    until = time.monotonic() + timeout_s
    while True:
        _reap(keep)
        left = [pid for pid in below(os.getpid()) if pid not in keep]
        if not left or time.monotonic() > until:
            return left
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _reap(keep: Sequence[int]) -> None:
    """Orphans that became our own children; the parents we keep are waited for by whoever started them."""
    for pid in children(os.getpid()):
        if pid not in keep:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
