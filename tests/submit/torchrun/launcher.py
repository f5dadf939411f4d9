"""Running `dalsegno torchrun` in tests: the program, the workers' Python, and the check for leftovers."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src"
OURS = [sys.executable, "-m", "dalsegno", "torchrun"]


def python_with_torch() -> str:
    """Return the Python that runs the tests, or the one in DALSEGNO_TEST_PYTHON."""
    named = os.environ.get("DALSEGNO_TEST_PYTHON")
    if named is None and importlib.util.find_spec("torch") is None:
        pytest.skip("no torch here: install it, or name a Python that has it in DALSEGNO_TEST_PYTHON")
    return named or sys.executable


@dataclass
class Launcher:
    """Starts torchruns in a folder; a mark in the environment of each identifies its processes."""

    folder: Path
    python: str
    env: dict[str, str] = field(default_factory=dict)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def mark(self) -> str:
        return f"TORCHRUN_TEST={self.folder}"

    def script(self, text: str, name: str = "train.py") -> str:
        (self.folder / name).write_text(textwrap.dedent(text))
        return name

    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PET_"))}
        own = {"PYTHONPATH": str(SOURCE), "PYTHON_EXEC": self.python, "TMPDIR": str(self.folder)}
        return {**inherited, **own, **dict([self.mark.split("=", 1)]), **self.env}

    def start(self, *words: str, program: list[str] | None = None, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*(program or OURS), *words], cwd=self.folder, env={**self.environment(), **env}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, *words: str, program: list[str] | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        return ended(self.start(*words, program=program, **env))

    def named(self, name: str) -> list[int]:
        """Return the processes of this folder with this name."""
        return [pid for pid in _marked(self.mark) if Path(f"/proc/{pid}/comm").read_text().strip() == name]

    def left(self) -> list[str]:
        """Return processes that still run, and temporary folders that were not removed."""
        found = [f"process {pid}: {_command(pid)}" for pid in _marked(self.mark)]
        return found + [
            path.name for path in self.folder.glob("*") if path.name.startswith(("torchelastic_", "dalsegno"))
        ]

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for pid in _marked(self.mark):
            os.kill(pid, signal.SIGKILL)


def ended(process: subprocess.Popen[str], timeout_s: float = 150) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _marked(mark: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and mark.encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
        except OSError:
            continue
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "ended"
