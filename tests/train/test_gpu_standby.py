"""On a GPU: a script cannot distinguish a standby worker from a new process, except that CUDA has started.

Run it with DALSEGNO_GPU_TESTS=yes; the rest of the suite hides the machine's GPUs.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU and DALSEGNO_GPU_TESTS=yes", allow_module_level=True)

from dalsegno.wire.frames import FileReader, Reader, send

START = "import sys; sys.path.insert(0, sys.argv[1]); from dalsegno.runs.agent.warm import start; start(sys.argv[1:])"
MODULES = ("torch", "torch.distributed", "torch._dynamo")
SCRIPT = """
import json, os, sys, threading
import torch, torch.distributed as dist
found = {
    "cpu_rng": torch.get_rng_state().sum().item(), "seed": torch.initial_seed(),
    "argv": sys.argv, "name": __name__, "file": __file__,
    "env": {name: value for name, value in os.environ.items() if not name.startswith("DALSEGNO_")},
    "group": dist.is_initialized(), "threads": threading.active_count(), "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "files": sorted({os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                     if os.path.exists(f"/proc/self/fd/{fd}") and "nvidia" not in os.readlink(f"/proc/self/fd/{fd}")}),
    "started": torch.cuda.is_initialized(),
}
found["device"] = torch.cuda.current_device()
torch.manual_seed(7)  # CUDA's generators start with a random seed in every process
found["random"] = torch.rand(4, device="cuda").tolist()
json.dump(found, open(sys.argv[1], "w"))
"""
# The statistics are read before anything is allocated.
STATISTICS = """
import json, sys
import torch
torch.cuda.init()
json.dump({k: v for k, v in torch.cuda.memory_stats().items() if v}, open(sys.argv[1], "w"))
"""


class PlayedAgent:
    """Simulates the agent: starts a warm parent and requests workers from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sock, other = socket.socketpair()
        packages = str(Path(__file__).parents[2] / "src")
        argv = [sys.executable, "-c", START, packages, str(other.fileno()), *MODULES]
        self.process = subprocess.Popen(argv, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL)
        other.close()
        self.reader = FileReader()
        self.messages: list[dict[str, Any]] = []
        assert self.next("warm")["warm"]["ok"]

    def next(self, key: str) -> dict[str, Any]:
        while True:
            for message in self.messages:
                if key in message:
                    self.messages.remove(message)
                    return message
            received = self.reader.receive(self.sock, True)
            assert received is not None, "the warm parent has ended"
            self.messages += received

    def env(self) -> dict[str, str]:
        return {**os.environ, "LOCAL_RANK": "0", "NCCL_DEBUG": "WARN"}

    def task(self, script: str, name: str) -> dict[str, Any]:
        path = self.folder / "script.py"
        path.write_text(script)
        log = str(self.folder / "log")
        return {
            "kind": "script", "name": "ds:w0", "env": self.env(), "cwd": str(self.folder), "script": str(path),
            "args": [str(self.folder / name)], "module": False, "stdout": log, "stderr": log, "stacks": "",
        }  # fmt: skip

    def run(self, script: str, *, standby: bool) -> Any:
        name = f"standby-{standby}.json"
        task = self.task(script, name)
        if standby:
            own, other = socket.socketpair()
            order = {
                "kind": "standby", "name": "ds:s0", "env": self.env(), "local_rank": 0, "gpu": True,
                "backend": "nccl", "id": "standby:0",
            }  # fmt: skip
            send(self.sock, {"fork": order, "files": 1}, [other.fileno()])
            other.close()
            outcome: list[Any] = []
            reader = Reader()
            while not outcome:
                data = own.recv(65536)
                assert data, "the standby has ended"
                outcome += reader.feed(data)
            assert outcome[0]["standby"].get("why") is None, outcome
            print("a standby holds", outcome[0]["standby"]["mib"], "MiB")
            send(own, {"go": task})
            own.close()
        else:
            send(self.sock, {"fork": {**task, "id": "1:0"}, "files": 0}, [])
        ended = self.next("ended")
        assert ended["code"] == 0, (self.folder / "log").read_text()
        return json.loads((self.folder / name).read_text())


@pytest.fixture
def agent(tmp_path: Path):
    agent = PlayedAgent(tmp_path)
    yield agent
    agent.process.kill()
    agent.process.wait()


def test_script_in_a_standby_sees_a_new_process(agent: PlayedAgent):
    fresh, standby = agent.run(SCRIPT, standby=False), agent.run(SCRIPT, standby=True)
    assert (fresh.pop("started"), standby.pop("started")) == (False, True)
    for found in (fresh, standby):
        found["argv"] = found["argv"][:1]
        found["files"] = [path for path in found["files"] if not path.startswith(("pipe:", "socket:", "anon_inode:"))]
    assert standby == fresh


def test_allocator_of_a_standby_has_no_history(agent: PlayedAgent):
    assert agent.run(STATISTICS, standby=True) == agent.run(STATISTICS, standby=False)
