"""The part of scale.py that measures the controller: the real one, with played node agents and generated answers of
Slurm.

The controller is the real program: its server for node agents, its recovery loop, its journal and its socket. Its
cluster has no machines that could be repaired. `scontrol` and `squeue` are shell scripts that print a generated cluster
in the format that Slurm 24.11.5 was recorded with. Their own cost is that of `cat` and `sed`, and is not counted.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agents

from dalsegno.errors import DalsegnoError
from dalsegno.recovery.client import ask
from dalsegno.recovery.controller import SECRETS, SOCKET, serve
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.parse.text import PLAIN
from dalsegno.system.processes import LocalRunner

PORT = 7350
LOST = 5  # number of the node that is cut off
RECORDED = Path(__file__).resolve().parents[1] / "tests/recorded/slurm-24.11.5"
JOB_NODES = 4  # nodes of each running job
CALM_S = 12.0  # longer than the pause between two rounds of a calm controller
LONGEST_S = 300.0
SCONTROL = """#!/bin/sh
# Stands in for scontrol in benchmarks/scale.py.
case "$*" in
*"show node"*) exec cat "{folder}/nodes.txt" ;;
update*) date +%s.%N >>"{folder}/updates" ;;
esac
"""
SQUEUE = """#!/bin/sh
# Stands in for squeue in benchmarks/scale.py. The separators are those that the client chose.
first="${{SQUEUE_FORMAT2#*:}}"
exec sed "s/\x1f/${{first%%,*}}/g; s/\x1e/${{SQUEUE_FORMAT2##*:}}/" "{folder}/squeue.txt"
"""


@dataclass
class ControllerFigures:
    """The figures of the controller with one number of nodes."""

    nodes: int
    connected_s: float
    cpu_percent: float
    memory_mib: float
    kbytes_per_s: float
    noticed_s: float  # a lost node: from the cut to its loss in the controller's table
    told_s: float  # a lost node: from the cut to the command that takes it out of service in Slurm
    false_alarms: int

    def describe(self) -> str:
        return (
            f"controller, {self.nodes} nodes: connected {self.connected_s:.1f} s; lost node: noticed "
            f"{self.noticed_s:.2f} s, taken out of service in Slurm {self.told_s:.2f} s; {self.false_alarms} false "
            f"alarms; {self.cpu_percent:.0f} % of a core, {self.memory_mib:.0f} MiB, {self.kbytes_per_s:.0f} kB/s"
        )


# Slurm


def write_slurm(folder: Path, nodes: int) -> None:
    """Write slurm.conf, the commands for PATH and what they print."""
    for name, text in (("scontrol", SCONTROL), ("squeue", SQUEUE)):
        (folder / name).write_text(text.format(folder=folder))
        (folder / name).chmod(0o755)
    (folder / "nodes.txt").write_text("".join(node_lines(nodes)))
    (folder / "squeue.txt").write_text("".join(job_rows(nodes)))
    places = (f"NodeName=n{number} NodeAddr={agents.address(number)} Port=6818\n" for number in range(nodes))
    (folder / "slurm.conf").write_text("ClusterName=scale\n" + "".join(places))


def node_lines(nodes: int) -> Iterator[str]:
    """Yield scontrol's lines: a recorded node in use, with other names and addresses."""
    lines = (RECORDED / "nodes.txt").read_text().splitlines(keepends=True)
    recorded = next(line for line in lines if "State=ALLOCATED " in line)
    for number in range(nodes):
        named = re.sub(r"NodeName=\S+", f"NodeName=n{number}", recorded)
        yield re.sub(r"NodeAddr=\S+", f"NodeAddr={agents.address(number)}", named)


def job_rows(nodes: int) -> Iterator[str]:
    """Yield squeue's rows: running jobs on all nodes, and the same number of pending jobs."""
    for job, first in enumerate(range(0, nodes, JOB_NODES), start=1000):
        where = f"n[{first}-{min(first + JOB_NODES, nodes) - 1}]"
        yield _row(job, "RUNNING", "None", where)
        yield _row(job + nodes, "PENDING", "Priority", "")


def _row(job: int, state: str, reason: str, where: str) -> str:
    fields = (
        job, job, "N/A", "N/A", "N/A", 1000, "user", "team", "normal", "train", state, reason, where, JOB_NODES,
        JOB_NODES, f"cpu={JOB_NODES},node={JOB_NODES}", 1000, 1794808450, 1794808451, "NONE", "N/A", "0:01",
        "UNLIMITED", "0:0", 0, 1, "(null)", "n/a", "train", "(null)",
    )  # fmt: skip
    return PLAIN.field.join(map(str, fields)) + PLAIN.record + "\n"


# Controller


class ScaleSite:
    """A cluster without machines to reset, reboot or replace. Its Slurm commands only print generated answers."""

    slurm_users = frozenset({"slurm", "root"})
    target = object()

    def __init__(self) -> None:
        self.slurm = SlurmClient(LocalRunner(), os.environ)

    def policy(self) -> Policy:
        return Policy(can=frozenset())

    def is_being_changed(self) -> bool:
        return False


def control(folder: Path) -> int:
    """Run the controller of a folder that `write_slurm` has filled."""
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    return serve(folder, ScaleSite(), f"{agents.HEAD}:{PORT}")


class ControllerStage:
    """A controller and the processes that play its node agents. `script` is scale.py, which starts them."""

    def __init__(self, script: str, nodes: int, players: int) -> None:
        self.nodes, self.folder = nodes, Path(tempfile.mkdtemp(prefix="dalsegno-scale-"))
        write_slurm(self.folder, nodes)
        for name in (SECRETS, Path(SOCKET).parent):
            (self.folder / name).mkdir(parents=True)
        for number in range(nodes):
            (self.folder / SECRETS / f"n{number}").write_bytes(agents.secret(f"n{number}"))
        self.log = (self.folder / "controller.log").open("wb")
        argv = [sys.executable, script, "--control", str(self.folder)]
        self.controller = subprocess.Popen(argv, stdout=self.log, stderr=self.log)
        share = -(-nodes // players)
        self.players = [
            subprocess.Popen(
                [sys.executable, script, "--play-nodes", f"{first},{min(share, nodes - first)}"],
                stderr=subprocess.DEVNULL,  # discarded, because an agent logs each attempt to connect
            )
            for first in range(0, nodes, share)
        ]

    def views(self) -> list[dict[str, Any]]:
        try:
            return list(ask(self.folder / SOCKET, {"agents": True}, 30.0)["agents"])
        except DalsegnoError:
            return []

    def presence(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for view in self.views():
            found[view["presence"]] = found.get(view["presence"], 0) + 1
        return found

    def until(self, true: Any, longest_s: float = LONGEST_S) -> None:
        end = time.monotonic() + longest_s
        while not true():
            if self.controller.poll() is not None or time.monotonic() > end:
                tail = (self.folder / "controller.log").read_text()[-2000:]
                raise SystemExit(f"the controller does not come so far: {self.presence()}\n{tail}")
            time.sleep(0.25)

    def updates(self) -> list[float]:
        """Return when the controller changed nodes in Slurm."""
        path = self.folder / "updates"
        return [float(line) for line in path.read_text().split()] if path.exists() else []

    def close(self) -> None:
        for process in (*self.players, self.controller):
            process.kill()
            process.wait()
        self.log.close()
        shutil.rmtree(self.folder)


def measure_controller(script: str, nodes: int, players: int, seconds: float, usage: Any) -> ControllerFigures:
    """Measure one number of nodes. `usage` returns a process's CPU seconds, its memory, and the bytes sent."""
    stage = ControllerStage(script, nodes, players)
    try:
        began = time.monotonic()
        stage.until(lambda: stage.presence().get("connected") == nodes)
        connected_s = time.monotonic() - began
        time.sleep(min(CALM_S, seconds))
        before, since = usage(stage.controller.pid), time.monotonic()
        time.sleep(seconds)
        after, took = usage(stage.controller.pid), time.monotonic() - since
        known = len(stage.updates())
        alarms = sum(view["presence"] in ("gone", "agent dead") for view in stage.views()) + known
        cut = time.time()
        agents.cut_off(LOST)
        lost: dict[str, Any] = {}

        def gone() -> bool:
            lost.update(next((view for view in stage.views() if view["node"] == f"n{LOST}"), {}))
            return lost.get("presence") == "gone"

        stage.until(gone)
        stage.until(lambda: len(stage.updates()) > known, 60.0)
        memory = usage(stage.controller.pid).memory_mib
        return ControllerFigures(
            nodes, connected_s, 100 * (after.cpu_s - before.cpu_s) / took, memory,
            (after.sent_bytes - before.sent_bytes) / took / 1000, lost["since"] - cut, stage.updates()[known] - cut,
            alarms,
        )  # fmt: skip
    finally:
        stage.close()
