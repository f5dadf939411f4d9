"""A private state folder for measurements: clusters are started and removed with the real command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = "bench"
IDLE_S = 300.0

FILE = """\
name: {name}
target: local
local: {{hosts: {hosts}}}
partitions:
  - {{name: train, nodes: {nodes}, gpus: 8, gpu_type: h100}}
slurm: {{accounting: {accounting}}}
health: {{mode: {health}, max_out: 50%, per_hour: 1000}}
"""


@dataclass(frozen=True)
class Shape:
    """The cluster that a row measures."""

    nodes: int
    hosts: str = "virtual"
    accounting: bool = True
    health: str = "observe"

    def file(self) -> str:
        accounting = "true" if self.accounting else "false"
        return FILE.format(name=NAME, hosts=self.hosts, nodes=self.nodes, accounting=accounting, health=self.health)


class Failed(Exception):
    """A command that should have worked did not."""


class Stage:
    """Runs `./dalsegno` with a private state folder."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="dsb-", dir="/tmp"))  # short, because the daemons' sockets are in it
        self.home.chmod(0o755)
        # Users have a cache of compiled modules. Without one, every measured start would compile the package.
        kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        unset = ("DALSEGNO_CLUSTER", "SLURM_CONF")
        self.env = {key: value for key, value in kept.items() if key not in unset} | {"DALSEGNO_HOME": str(self.home)}

    @property
    def cluster(self) -> Path:
        return self.home / "clusters" / NAME

    @property
    def slurm_env(self) -> dict[str, str]:
        return {**self.env, "SLURM_CONF": str(self.cluster / "etc/slurm.conf")}

    def dalsegno(self, *args: str) -> float:
        """Run one command and return its seconds."""
        return self.timed([str(ROOT / "dalsegno"), *args], self.env)

    def timed(self, argv: Sequence[str], env: dict[str, str]) -> float:
        started = time.monotonic()
        done = subprocess.run(argv, env=env, cwd=self.home, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise Failed(f"{' '.join(argv)} ended with code {done.returncode}\n{done.stdout}{done.stderr}".rstrip())
        return time.monotonic() - started

    def up(self, shape: Shape) -> float:
        """Start a cluster. Return the seconds until `up` has returned and sinfo shows every node idle."""
        file = self.home / "cluster.yaml"
        file.write_text(shape.file())
        started = time.monotonic()
        self.dalsegno("up", str(file))
        self._wait_until_idle(shape.nodes, started + IDLE_S)
        return time.monotonic() - started

    def down(self) -> float:
        return self.dalsegno("down", NAME)

    def forget_template(self) -> None:
        """Remove the cached database template, as on a machine without an earlier cluster."""
        shutil.rmtree(self.home / "cache", ignore_errors=True)

    def close(self) -> list[str]:
        """Remove the cluster. Return what is left of it; then its folder is kept."""
        left = []
        try:
            if self.cluster.exists():
                self.down()
        except Failed as error:
            left.append(str(error))
        left += leftovers(self.cluster)
        if not left:
            shutil.rmtree(self.home, ignore_errors=True)
        return left

    def _wait_until_idle(self, nodes: int, until: float) -> None:
        argv = ["sinfo", "--noheader", "--Node", "--format=%N %T"]
        while True:
            said = subprocess.run(argv, env=self.slurm_env, capture_output=True, text=True, check=True).stdout
            if len({line for line in said.splitlines() if line.endswith(" idle")}) == nodes:
                return
            if time.monotonic() > until:
                raise Failed(f"not all of {nodes} nodes became idle within {IDLE_S:.0f} s:\n{said[-2000:]}")
            time.sleep(0.01)


def leftovers(cluster: Path) -> list[str]:
    """Return processes, links, cgroups, mounts and files that are left of a cluster."""
    sys.path.insert(0, str(ROOT / "src"))
    from dalsegno.system.children import environment, find
    from dalsegno.targets.local.folder import Folder

    mark = str(cluster).encode()
    mine = Folder(cluster).id
    processes = find(lambda pid: any(mark in entry.partition(b"=")[2] for entry in environment(pid)))
    links = [name for name in os.listdir("/sys/class/net") if name.startswith(f"ds{mine}")]
    cgroups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/dalsegno-{mine}")]
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(cluster) in line]
    files = [str(cluster)] if cluster.exists() else []
    return [*(f"process {process.pid}" for process in processes), *links, *cgroups, *mounts, *files]
