"""A controller in its own process, with fake coordinators that follow their run's plan."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.recovery.client import ask, start_run
from dalsegno.recovery.controller import RUNS, SOCKET
from dalsegno.system.children import end, marked
from dalsegno.wire.frames import Message, Reader
from tests.waiting import eventually

SOURCE = Path(__file__).parents[2] / "src"
SERVE = """
import os, sys
from pathlib import Path
from dalsegno.log import start_logging
from dalsegno.recovery.controller import Controller
start_logging("controller")
Controller(Path(sys.argv[1]), (sys.executable, "-I", sys.argv[2]), os.environ).serve()
"""
COORDINATE = """
import json, os, sys, time
folder = sys.argv[2]
with open(os.path.join(folder, "plan.json")) as file:
    plan = json.load(file)
about = {"pid": os.getpid(), "sid": os.getsid(0), "cwd": os.getcwd(), "uid": os.getuid(), "gid": os.getgid(),
         "groups": os.getgroups(), "env": dict(os.environ)}
with open(os.path.join(folder, "started"), "a") as file:
    file.write(json.dumps(about) + chr(10))
if "code" in plan:
    sys.exit(plan["code"])
time.sleep(1000)
"""


@dataclass
class Stage:
    """A state folder with a controller process."""

    root: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.root / SOCKET

    def up(self, uid: int | None = None) -> None:
        """Start a controller and wait until it answers."""
        (self.root / "run").mkdir(exist_ok=True)
        (self.root / "coordinate.py").write_text(COORDINATE)
        env = {"PYTHONPATH": str(SOURCE), "PATH": os.defpath, "DALSEGNO_MARK": str(self.root), "SECRET": "no"}
        argv = [sys.executable, "-c", SERVE, str(self.root), str(self.root / "coordinate.py")]
        with open(self.root / "log", "ab") as log:
            self.processes.append(subprocess.Popen(argv, env=env, stderr=log, user=uid, group=uid))
        eventually(self.answers)

    def answers(self) -> bool:
        assert self.processes[-1].poll() is None, (self.root / "log").read_text()
        with socket.socket(socket.AF_UNIX) as sock:
            return sock.connect_ex(str(self.socket)) == 0

    def kill(self) -> None:
        self.processes[-1].send_signal(signal.SIGKILL)
        self.processes[-1].wait()

    def close(self) -> None:
        self.kill()
        end(marked(str(self.root)))

    def run(self, name: str, owner: int | None = None, **plan: object) -> Path:
        """Create a run folder; its coordinator sleeps, or exits with `code`."""
        folder = self.root / "home" / name
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps(plan))
        if owner is not None:
            os.chown(folder, owner, owner)
        return folder

    def start(self, folder: Path) -> None:
        start_run(self.socket, folder)

    def runs(self) -> list[Message]:
        found: list[Message] = ask(self.socket, {"runs": True}, 60)["runs"]
        return found

    def record(self, folder: Path) -> Path:
        return self.root / RUNS / f"{folder.name}.json"

    def started(self, folder: Path) -> list[Message]:
        """Return what the run's coordinators reported, in the order of their starts."""
        path = folder / "started"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pids(self, folder: Path) -> list[int]:
        return [int(one["pid"]) for one in self.started(folder)]


def say_and_hear(path: Path, data: bytes) -> Message | None:
    """Send raw bytes to the socket; return the answer, or None if the connection is closed."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(path))
        try:
            sock.sendall(data)
            reader = Reader()
            while got := sock.recv(65536):
                for message in reader.feed(got):
                    return message
        except (BrokenPipeError, ConnectionResetError):
            pass
    return None
