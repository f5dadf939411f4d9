"""The operator of a cluster on virtual hosts: `dalsegno` on this machine, with a home and a cluster file of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.machines.rack import MachineRack
from tests.ssh.hosts import HostRack

SHELL = ("SLURM_CONF", "DALSEGNO_CLUSTER", "DALSEGNO_CONTROLLER")  # variables that a shell of another cluster sets
SOURCE = Path(__file__).parents[2] / "src"


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Operator:
    """Runs `dalsegno` for one cluster file."""

    folder: Path
    rack: HostRack | MachineRack
    source: Path = SOURCE  # the code of `dalsegno`
    enter: tuple[str, ...] = ()  # the command prefix that enters the network of the hosts
    timeout_s: float = 300.0

    @property
    def file(self) -> Path:
        return self.folder / "cluster.yaml"

    @property
    def state(self) -> Path:
        return self.folder / "home/clusters/lab"

    def clear_hosts(self) -> None:
        """Hide the clusters of this machine from the hosts, which start with its /var."""
        for host in self.rack.hosts:
            host.run("rm", "-rf", "/var/lib/dalsegno")

    def write(self, nodes: str = "n[1-2]", more: str = "slurm: {accounting: false}\n", user: str = "root") -> None:
        """Write the cluster file, with the hosts `head` and `login` and those that `nodes` names."""
        hosts = ", ".join(f"{host.name}: {host.address}" for host in self.rack.hosts if _is_in(host.name, nodes))
        self.file.write_text(
            f"name: lab\ntarget: ssh\npartitions: [{{name: train, nodes: '{nodes}'}}]\n{more}"
            f"ssh:\n  user: {user}\n  key: {self.rack.key}\n  known_hosts: {self.rack.known_hosts}\n"
            f"  hosts: {{{hosts}}}\n"
        )

    def dalsegno(self, *words: str, code: int | None = 0, stdin: str = "") -> Done:
        done = subprocess.run(
            [*self.enter, sys.executable, "-m", "dalsegno", *words], cwd=self.folder, env=self._env(), input=stdin,
            capture_output=True, text=True, timeout=self.timeout_s,
        )  # fmt: skip
        assert code is None or done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return Done(done.returncode, done.stdout, done.stderr)

    def _env(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if name not in SHELL}
        return {**env, "PYTHONPATH": str(self.source), "DALSEGNO_HOME": str(self.folder / "home"), "NO_COLOR": "1"}

    def up(self, code: int | None = 0) -> Done:
        return self.dalsegno("up", str(self.file), code=code)

    def start_up(self) -> subprocess.Popen[str]:
        """Start `up`, whose messages can be read while it runs."""
        argv = [*self.enter, sys.executable, "-m", "dalsegno", "up", str(self.file)]
        return subprocess.Popen(argv, cwd=self.folder, env=self._env(), stderr=subprocess.PIPE, text=True)

    def on_head(self, *argv: str, stdin: str = "") -> str:
        return self.rack.hosts[0].run(*argv, stdin=stdin)


def _is_in(name: str, nodes: str) -> bool:
    from dalsegno.hostlist import expand

    return name in ("head", "login") or name in expand(nodes)
