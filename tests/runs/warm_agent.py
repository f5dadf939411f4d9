"""The agent's side of a real warm parent, over its socket."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from dalsegno.wire.frames import FileReader, Message, Reader, send

SOURCE = str(Path(__file__).parents[2] / "src")
START = "import sys; sys.path.insert(0, sys.argv[1]); from dalsegno.runs.agent.warm import start; start(sys.argv[1:])"


class Agent:
    """The agent's side of the socket."""

    def __init__(
        self,
        folder: Path,
        *modules: str,
        python: str = sys.executable,
        env: dict[str, str] | None = None,
        packages: str = SOURCE,
    ) -> None:
        self.folder = folder
        self.sock, other = socket.socketpair()
        self.reader, self.heard = FileReader(), []  # type: tuple[FileReader, list[Message]]
        self.process = subprocess.Popen(
            [python, "-c", START, packages, str(other.fileno()), *modules], pass_fds=[other.fileno()], env=env
        )
        other.close()
        self.sock.settimeout(60)
        self.running: set[int] = set()

    def hear(self, key: str) -> Message:
        """Return the next message with this key. Other messages are kept for later."""
        while True:
            for message in self.heard:
                if key in message:
                    self.heard.remove(message)
                    self.running.discard(message.get("ended"))
                    return message
            messages = self.reader.receive(self.sock)
            assert messages is not None, "the warm parent is gone"
            self.heard += messages

    def task(
        self, script: Path | str, *args: str, env: dict[str, str] | None = None, cwd: Path | None = None, **more: object
    ) -> Message:
        return {
            "id": "w", "script": str(script), "args": list(args), "env": env or {}, "cwd": str(cwd or self.folder),
            "stdout": str(self.folder / "out"), "stderr": str(self.folder / "err"), **more,
        }  # fmt: skip

    def fork(self, script: Path | str, *args: str, **more: object) -> int:
        return self._fork(self.task(script, *args, **more))  # type: ignore[arg-type]

    def _fork(self, task: Message, files: Sequence[int] = ()) -> int:
        send(self.sock, {"fork": task, "files": len(files)}, files)
        pid = int(self.hear("forked")["pid"])
        self.running.add(pid)
        return pid

    def run_in_standby(self, task: Message, env: dict[str, str], gpu: bool = False) -> int:
        """Fork a standby worker, by default without a GPU. Return the exit code of the task that it is given."""
        own, other = socket.socketpair()
        order = {
            "id": "s",
            "kind": "standby",
            "name": "ds:s0",
            "env": env,
            "local_rank": 0,
            "gpu": gpu,
            "backend": "",
        }
        with own, other:
            pid = self._fork(order, [other.fileno()])
            other.close()
            (ready,) = Reader().feed(own.recv(65536))
            assert ready == {"standby": {"mib": None if gpu else 0}}
            send(own, {"go": task})
            ended = self.hear("ended")
        assert ended["ended"] == pid
        return int(ended["code"])

    def run(self, script: Path | str, *args: str, **more: object) -> int:
        pid = self.fork(script, *args, **more)  # type: ignore[arg-type]
        ended = self.hear("ended")
        assert ended["ended"] == pid
        return int(ended["code"])

    def end_workers(self) -> None:
        for pid in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        while self.running:
            self.hear("ended")
        self.heard.clear()

    def close(self) -> None:
        self.sock.close()
        self.process.wait(60)


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path
