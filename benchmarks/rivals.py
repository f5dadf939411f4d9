"""Start the same training with Dal Segno, with torchrun under srun, or with torchrun in a requeued Slurm job."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from stage import ROOT, Failed, Stage

PYTHON = ROOT / ".venv/bin/python"
TRAINING = ROOT / "benchmarks/training.py"
PORT = 29_400


class Ours:
    """`dalsegno run`."""

    name = "dalsegno run"

    def __init__(self, stage: Stage, *options: str) -> None:
        self.stage, self.options = stage, options
        self.run = ""

    def start(self, folder: Path, program: Path = TRAINING) -> None:
        argv = [str(ROOT / "dalsegno"), "run", "--detach", "--max-restarts", "1000", *self.options]
        env = {**self.stage.env, "PATH": f"{PYTHON.parent}:{self.stage.env['PATH']}"}
        done = subprocess.run([*argv, str(program), str(folder)], env=env, capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"dalsegno run failed: {done.stderr}")
        self.run = done.stdout.strip()

    @property
    def runs(self) -> Path:
        return self.stage.home / "runs" / self.run

    def status(self) -> dict[str, object]:
        status: dict[str, object] = json.loads((self.runs / "status.json").read_text())
        return status

    def worker(self, rank: int) -> int:
        return _only(lambda pid: _comm(pid) == f"ds:w{rank}" and _is_leader(pid))

    def srun(self) -> int:
        return min(_find(lambda pid: _comm(pid) == "srun" and self.run in _command_line(pid)))

    def lost_at(self, node: str) -> float:
        """Return when the coordinator declared the node lost."""
        lines = [json.loads(line) for line in (self.runs / "journal.jsonl").read_text().splitlines()]
        return max(line["at"] for line in lines if line["event"] == "lost" and line["node"] == node)

    def stop(self) -> None:
        self.stage.dalsegno("cancel", self.run)


class Torchrun:
    """torchrun in a batch job: with restarts, elastic, or requeued by Slurm."""

    def __init__(
        self, stage: Stage, nnodes: str, *, nodes: int, requeue: bool = False, own_store: bool = False
    ) -> None:
        """Create a launcher. If `own_store` is set, each attempt uses a new store, which is not torchrun's default."""
        self.stage, self.nnodes, self.nodes, self.requeue = stage, nnodes, nodes, requeue
        self.env = {**stage.slurm_env, **({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if own_store else {})}
        self.name = "torchrun, job requeued by Slurm" if requeue else f"torchrun --nnodes {nnodes}"
        self.job = ""

    def start(self, folder: Path) -> None:
        """Start the job with its store on the last node, which the benchmarks never take down."""
        torchrun = [
            str(PYTHON), "-m", "torch.distributed.run", "--nnodes", self.nnodes, "--nproc-per-node", "1",
            "--max-restarts", "0" if self.requeue else "100", "--rdzv-backend", "c10d", "--rdzv-id", folder.name,
        ]  # fmt: skip
        flags = ["--no-kill"] if not self.requeue else []
        script = (
            "#!/bin/bash\n"
            'nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))\n'
            f'exec srun {shlex.join(flags)} {shlex.join(torchrun)} --rdzv-endpoint "${{nodes[-1]}}:{PORT}" '
            f"{shlex.join([str(TRAINING), str(folder)])}\n"
        )
        argv = ["sbatch", "--parsable", f"--nodes={self.nodes}", "--ntasks-per-node=1", f"--output={folder}/job.log"]
        argv += ["--requeue" if self.requeue else "--no-kill", "--open-mode=append"]
        env = {**self.env, "TMPDIR": str(folder)}  # for the temporary folders that torchrun leaves behind
        done = subprocess.run(argv, input=script, env=env, capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"sbatch failed: {done.stderr}")
        self.job = done.stdout.strip()

    def worker(self, rank: int) -> int:
        return _only(lambda pid: "torch.distributed.run" not in _command_line(pid) and _has_rank(pid, rank))

    def stop(self) -> None:
        subprocess.run(["scancel", self.job], env=self.stage.slurm_env, check=False)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            said = subprocess.run(
                ["squeue", "-h", "-j", self.job], env=self.stage.slurm_env, capture_output=True, text=True
            )
            if not said.stdout.strip():
                return
            time.sleep(0.2)


def kill(pid: int) -> float:
    """Kill the process and return the time just before."""
    now = time.time()
    os.kill(pid, signal.SIGKILL)
    return now


def _find(matches: Callable[[int], bool]) -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and matches(int(name))]


def _only(matches: Callable[[int], bool]) -> int:
    found = _find(matches)
    if not found:
        raise Failed("the process was not found")
    return min(found)


def _comm(pid: int) -> str:
    return _text(pid, "comm").strip()


def _command_line(pid: int) -> str:
    return _text(pid, "cmdline").replace("\0", " ")


def _has_rank(pid: int, rank: int) -> bool:
    return f"\0RANK={rank}\0" in f"\0{_text(pid, 'environ')}" and TRAINING.name in _command_line(pid)


def _is_leader(pid: int) -> bool:
    """Return whether a process leads its process group. A worker does; its children, which have its name, do not."""
    fields = _text(pid, "stat").rpartition(")")[2].split()
    return len(fields) > 2 and int(fields[2]) == pid


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""
