"""Tests of node agents on virtual hosts: faults are detected at once and distinguished."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.recovery.client import ask
from dalsegno.system.children import arguments, descendants
from dalsegno.system.hosts import host_process
from dalsegno.wire.frames import Message
from tests.cluster.conftest import Cli, at_home, taken_down
from tests.cluster.programs import programs
from tests.waiting import eventually

FILE = """
name: one
target: local
partitions:
  - {name: train, nodes: 3, gpus: 2, gpu_type: h100, cpus: 4, memory: 2G, default: true}
slurm: {accounting: false}
health: {mode: observe}
"""


@pytest.fixture(scope="module")
def three(cache: Path) -> Iterator[Cli]:
    with taken_down(at_home(cache)) as cli:
        cli.ok("up", cli.file(FILE))
        eventually(lambda: all(view(cli, f"train-{n}")["checks"] for n in (1, 2, 3)))
        yield cli


def view(cli: Cli, node: str) -> Message:
    views = ask(cli.home / "clusters/one/run/controller.sock", {"agents": True}, 60)["agents"]
    return {str(each["node"]): each for each in views}[node]


def is_now(cli: Cli, node: str, presence: str) -> bool:
    return bool(view(cli, node)["presence"] == presence)


@pytest.mark.alone
def test_node_agents_use_little_cpu(three: Cli):
    before, began = [ticks(three, n) for n in (1, 2, 3)], time.monotonic()
    time.sleep(8)  # the period that is measured
    taken = sum(ticks(three, n) for n in (1, 2, 3)) - sum(before)
    percent = taken * 100 / os.sysconf("SC_CLK_TCK") / 3 / (time.monotonic() - began)
    assert percent < 1.0, "share of one CPU per agent"


def ticks(cli: Cli, number: int) -> int:
    """Return the CPU time of an agent and its children, including ended ones."""
    host = host_process(cli.home / f"clusters/one/hosts/train-{number}")
    assert host is not None
    own = [pid for pid in descendants(host.pid) if "node-agent" in arguments(pid)]
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in own]
    return sum(int(each) for stat in stats for each in stat[11:15])


@pytest.mark.alone
def test_power_cut_is_detected_and_next_boot_has_a_new_id(three: Cli):
    host = host_process(three.home / "clusters/one/hosts/train-2")
    assert host is not None and is_now(three, "train-2", "connected")
    before = view(three, "train-2")["boot"]
    cut = three.start("inject", "power-off", "train-2")
    eventually(lambda: not host.alive(), every_s=0.002)
    at = time.time()
    eventually(lambda: is_now(three, "train-2", "gone"), every_s=0.02)
    cut.wait()
    lost = view(three, "train-2")
    assert lost["since"] - at <= 1.5
    assert (lost["host"], lost["slurmd"]) == (False, False), "neither host nor slurmd answers"
    assert all(is_now(three, node, "connected") for node in ("train-1", "train-3"))
    three.ok("up", str(three.home / "cluster.yaml"))
    eventually(lambda: is_now(three, "train-2", "connected"))
    assert view(three, "train-2")["boot"] != before


def test_dead_agent_is_restarted_and_its_node_stays(three: Cli):
    agent = pid_of(three, "train-3", "node-agent")
    three.ok("inject", "agent-dead", "train-3")
    eventually(lambda: is_now(three, "train-3", "agent dead"))
    assert view(three, "train-3")["host"] is True and not os.path.exists(f"/proc/{agent}")
    three.ok("inject", "--clear", "train-3")
    eventually(lambda: is_now(three, "train-3", "connected"))


def test_paused_controller_declares_no_agent_lost(three: Cli):
    """On a busy machine, an agent may be late for other reasons. The test then tries again."""
    assert any(stands_still_unnoticed(three) for _ in range(3))


def stands_still_unnoticed(cli: Cli) -> bool:
    eventually(lambda: all(is_now(cli, f"train-{n}", "connected") for n in (1, 2, 3)))
    before = [view(cli, f"train-{n}") for n in (1, 2, 3)]
    controller = pid_of(cli, "head", "controller")
    os.kill(controller, signal.SIGSTOP)
    time.sleep(2.5)  # longer than the timeout for a lost node
    os.kill(controller, signal.SIGCONT)
    eventually(lambda: all(view(cli, f"train-{n}")["heard"] > before[0]["heard"] + 3 for n in (1, 2, 3)))
    return [view(cli, f"train-{n}")["since"] for n in (1, 2, 3)] == [each["since"] for each in before]


def test_stopped_agent_is_silent_and_its_node_is_not_lost(three: Cli):
    agent = pid_of(three, "train-1", "node-agent")
    os.kill(agent, signal.SIGSTOP)
    eventually(lambda: is_now(three, "train-1", "silent") and view(three, "train-1")["host"], every_s=0.05)
    os.kill(agent, signal.SIGCONT)
    eventually(lambda: is_now(three, "train-1", "connected"), every_s=0.05)


def pid_of(cli: Cli, host: str, program: str) -> int:
    process = host_process(cli.home / "clusters/one/hosts" / host)
    assert process is not None
    return programs(descendants(process.pid), lambda words: program in words)[0]


def test_plain_user_cannot_read_secrets_or_write_controller_files(three: Cli):
    root = three.home / "clusters/one"
    assert (root / "secret/agents/train-1").is_file() and (root / "controller").is_dir()
    for words in (
        ["cat", "secret/agents/train-1"], ["ls", "secret"], ["ls", "controller"], ["touch", "controller/x"],
        ["touch", "etc/health.json"], ["touch", "hosts/train-1/telemetry.json"], ["touch", "hosts/train-1/plan.json"],
    ):  # fmt: skip
        done = subprocess.run(["setpriv", "--reuid=65534", "--clear-groups", *words], cwd=root, capture_output=True)
        assert done.returncode != 0 and b"ermission denied" in done.stderr, words


def test_broken_gpu_is_reported(three: Cli):
    three.ok("inject", "xid", "79", "train-1")
    eventually(lambda: any(each[:2] == ["xid", "failed"] for each in view(three, "train-1")["findings"]), every_s=0.05)
    three.ok("inject", "--clear", "train-1")
    eventually(lambda: not any(each[0] == "xid" for each in view(three, "train-1")["findings"]))


def test_agents_reconnect_to_a_restarted_controller(three: Cli):
    os.kill(pid_of(three, "head", "controller"), signal.SIGKILL)
    eventually(lambda: _answers(three) and all(is_now(three, f"train-{n}", "connected") for n in (1, 2, 3)))


def _answers(cli: Cli) -> bool:
    try:
        return bool(view(cli, "train-1"))
    except (DalsegnoError, KeyError):  # the host is booting
        return False
