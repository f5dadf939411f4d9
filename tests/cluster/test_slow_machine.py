"""Tests that a node twenty times slower than usual fails no check and is not drained."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dalsegno.health.checks.services import ask_munge, judge_munge
from dalsegno.health.local_machine import machine_here
from dalsegno.health.node_reader import LocalNode
from dalsegno.health.result import Verdict
from dalsegno.recovery.client import ask
from dalsegno.system.children import descendants
from dalsegno.system.hanging_calls import TooLate
from dalsegno.system.hosts import host_process
from dalsegno.system.processes import Completed
from tests.cluster.conftest import Cli, at_home, taken_down
from tests.waiting import eventually

FILE = """
name: one
target: local
partitions:
  - {name: train, nodes: 2, gpus: 2, gpu_type: h100, cpus: 4, memory: 1G, default: true}
slurm: {accounting: false}
health: {per_hour: 100, max_out: 100%, checks: {pair-collective: off, load-product: off, load-memory: off}}
"""
SLOW_S = 240 if os.environ.get("DALSEGNO_LONG") else 25
PERIOD_US, QUOTA_US = 100_000, 2_500  # a fortieth of one core, which the busy job on the node shares
# Repeats the checks that contact other daemons, from inside the node, and prints all that did not pass.
CHECKS = """
import os, sys, time
from dalsegno.health.check import Context
from dalsegno.health.checks import CHECKS
from dalsegno.health.local_machine import machine_here
from dalsegno.health.runner import examine

until, machine = time.time() + float(sys.argv[1]), machine_here(os.environ, "train-1")
asked = [check for check in CHECKS if check.name in ("munge", "host-names", "slurmd", "file-systems", "disk")]
print("begins", flush=True)
while time.time() < until:
    for each in examine(asked, Context.VALIDATION, machine, {}):
        print(each.result.verdict.value, each.check, each.result.text, flush=True)
"""


@pytest.fixture(scope="module")
def cluster(cache: Path) -> Iterator[Cli]:
    with taken_down(at_home(cache)) as cli:
        cli.ok("up", cli.file(FILE))
        eventually(lambda: all(phase == "in service" for phase in phases(cli).values()) and len(phases(cli)) == 2)
        yield cli


def controller(cli: Cli, **request: object) -> dict[str, object]:
    answer: dict[str, object] = ask(cli.home / "clusters/one/run/controller.sock", request, 100)
    return answer


def phases(cli: Cli) -> dict[str, str]:
    nodes: list[dict[str, str]] = controller(cli, nodes=True)["nodes"]  # type: ignore[assignment]
    return {node["node"]: node["phase"] for node in nodes}


def host_pid(cli: Cli, node: str) -> int:
    host = host_process(cli.home / f"clusters/one/hosts/{node}")
    assert host is not None
    return host.pid


@contextlib.contextmanager
def slowed(cli: Cli, node: str) -> Iterator[Path]:
    """Limit all processes of a node to a small share of one CPU; yield their cgroup."""
    root = Path("/sys/fs/cgroup/cpu")
    if not (root / "cpu.cfs_quota_us").exists():
        pytest.skip("needs the cpu controller of cgroup v1 to slow a node down")
    group = root / f"ds-slow-{cli.home.name}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        for _ in range(2):  # a process may have forked in the meantime
            move([host_pid(cli, node), *descendants(host_pid(cli, node))], group)
        (group / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
        yield group
    finally:
        (group / "cpu.cfs_quota_us").write_text("-1")
        eventually(lambda: is_empty(group, root))
        group.rmdir()


def move(pids: Sequence[int], group: Path) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            (group / "cgroup.procs").write_text(str(pid))


def is_empty(group: Path, root: Path) -> bool:
    move([int(pid) for pid in (group / "cgroup.procs").read_text().split()], root)
    return not (group / "cgroup.procs").read_text()


def test_healthy_node_that_is_slow_stays_in_service(cluster: Cli) -> None:
    busy = "srun sh -c 'while :; do :; done'"
    cluster.ok("shell", "--", "sbatch", "-w", "train-1", "-n4", "-o", "/dev/null", "--wrap", busy)
    eventually(lambda: "R" in cluster.ok("shell", "--", "squeue", "-h", "-o", "%t"))
    env = {**cluster.env, "SLURM_CONF": str(cluster.home / "clusters/one/etc/slurm.conf")}
    enter = ["nsenter", "-t", str(host_pid(cluster, "train-1")), "--mount", "--uts", "--ipc", "--net", "--pid"]
    argv = [*enter, sys.executable, "-u", "-c", CHECKS, str(SLOW_S)]
    with slowed(cluster, "train-1") as group:
        checks = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)
        assert checks.stdout is not None and checks.stdout.readline() == "begins\n"
        move([checks.pid, *descendants(checks.pid)], group)
        found = checks.stdout.read().splitlines()
        assert checks.wait() == 0
        throttled = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        assert int(throttled["nr_throttled"]) > SLOW_S * 5, "it was slow all the time"
        assert phases(cluster)["train-1"] in ("in service", "suspected"), "its agent may have been silent for a while"
    cluster.ok("shell", "--", "scancel", "--user=root")
    assert len(found) >= 5 and [line for line in found if line.startswith("failed")] == []
    events: list[dict[str, str]] = controller(cluster, events=0)["events"]  # type: ignore[assignment]
    assert [each for each in events if each["kind"] not in ("turn", "note")] == [], "no action on any node"
    eventually(lambda: set(phases(cluster).values()) == {"in service"}, 100)
    states = json.loads(cluster.ok("status", "--json"))["nodes"]
    assert [(node["name"], node["reason"]) for node in states] == [("train-1", ""), ("train-2", "")]


class LateOnce(LocalNode):
    """A node whose first `unmunge` times out after munged has decoded the credential."""

    late = 0

    def run(self, argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 5.0) -> Completed:
        done = super().run(argv, stdin=stdin, timeout_s=timeout_s)
        if argv[0] == "unmunge" and not self.late:
            self.late += 1
            raise TooLate("`unmunge` gave no answer in time")
        return done


def test_munge_check_decodes_fresh_credential_after_timeout(cluster: Cli) -> None:
    """If the first credential were sent again, it would count as replayed."""
    conf = cluster.home / "clusters/one/etc/slurm.conf"
    node = LateOnce(machine_here({**cluster.env, "SLURM_CONF": str(conf)}, "train-1").expected, cluster.env)
    assert judge_munge(ask_munge(node)).verdict is Verdict.PASSED and node.late
