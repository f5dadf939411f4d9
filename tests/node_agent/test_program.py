"""Tests of the agent as it runs on a node: small, without heavy libraries, with real checks and orders."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.health.checks import CHECKS
from dalsegno.health.messages import Finding
from dalsegno.health.result import Remedy, Verdict
from dalsegno.health.telemetry import healthy, with_gpu, write_telemetry
from dalsegno.node_agent.agent import NodeAgentOptions, main, parse_options
from dalsegno.node_agent.textfile import NAME
from dalsegno.programs import launcher
from dalsegno.recovery.agents.node_link import validate_node
from dalsegno.recovery.agents.probes import NodeAddress
from dalsegno.recovery.agents.table import OrderAnswer, OrderEnd
from dalsegno.recovery.agents.view import AgentView
from dalsegno.system.children import MARK, descendants, marked
from dalsegno.wire.liveness import Presence
from tests.recovery.played_agents import NODES, Scene, secret_of

pytestmark = pytest.mark.cluster  # real processes: too slow for the unit part

HEAVY = {
    "pydantic", "click", "torch", "numpy", "yaml", "rich", "asyncio", "sqlite3", "argparse", "http", "email",
    "ssl", "xml", "tempfile", "multiprocessing", "concurrent", "unittest",
}  # fmt: skip
ASKED_KIB = 30_000_000 // 1024  # memory limit of each process
CONF = "ClusterName=c\nNodeName=gpu-[1-2] NodeAddr=127.0.0.1 Port=1 Gres=gpu:h100:2 RealMemory=1\nAuthType=auth/none\n"


class Nodes(Scene):
    """Two nodes with their agents."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "slurm.conf").write_text(CONF)

    def telemetry(self, node: str) -> Path:
        return self.folder / f"{node}.json"

    def start(self, node: str, *more: str) -> subprocess.Popen[bytes]:
        write_telemetry(self.telemetry(node), healthy(node, 2, "h100"))
        (self.folder / f"{node}.boot").write_text(f"boot-of-{node}\n")
        (self.folder / f"{node}.secret").write_bytes(secret_of(node) or b"")
        argv = [*launcher(), "node-agent", "--node", node, "--controller", f"127.0.0.1:{self.port}"]
        argv += ["--secret", str(self.folder / f"{node}.secret"), "--boot-id", str(self.folder / f"{node}.boot")]
        argv += more
        env = {"PATH": os.defpath, MARK: str(self.folder), "SLURM_CONF": str(self.folder / "slurm.conf")}
        with open(self.folder / "log", "ab") as log:
            process = subprocess.Popen(
                argv, env={**env, "DALSEGNO_TELEMETRY": str(self.telemetry(node))}, stderr=log, cwd="/"
            )
        self.processes[node] = process
        return process

    def view(self, node: str) -> AgentView:
        return self.agents.view(node)

    def only_gpu_checks(self) -> None:
        """Enable only the checks of the simulated GPUs, so that faults of this machine do not matter."""
        others = {check.name: {"enabled": False} for check in CHECKS if not check.name.startswith("gpu-")}
        places = {node: NodeAddress("127.0.0.1") for node in NODES}
        self.agents.expect(places, {node: {"checks": others} for node in places})

    def verdicts(self, node: str) -> dict[str, Verdict]:
        report = self.view(node).report
        return {each.check: each.result.verdict for each in report.findings} if report else {}

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        super().close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    one = Nodes(tmp_path)
    yield one
    one.close()


def memory_kib(pid: int, line: str, file: str) -> int:
    for each in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        if each.startswith(line):
            return int(each.split()[1])
    raise AssertionError(f"no {line} of {pid}")


@pytest.mark.waits
def test_the_agent_is_small_and_reports_a_broken_gpu(nodes: Nodes):
    agent = nodes.start("gpu-1")
    nodes.until(lambda: nodes.verdicts("gpu-1").get("gpu-ecc") is Verdict.PASSED)
    assert nodes.view("gpu-1").boot == "boot-of-gpu-1"
    all_of_it = [agent.pid, *descendants(agent.pid)]
    # Includes the shared pages of the interpreter: 22 MiB with Python 3.11, 27 with 3.14.
    assert max(memory_kib(pid, "VmRSS:", "status") for pid in all_of_it) <= ASKED_KIB
    assert sum(memory_kib(pid, "Pss:", "smaps_rollup") for pid in all_of_it) <= 30 << 10
    report = nodes.view("gpu-1").report
    assert report is not None and len(report.gpus) == 2 and report.gpus[0].uuid.startswith("GPU-")
    write_telemetry(nodes.telemetry("gpu-1"), with_gpu(healthy("gpu-1", 2, "h100"), 1, ecc_uncorrected=3))
    nodes.until(lambda: nodes.verdicts("gpu-1")["gpu-ecc"] is Verdict.FAILED)
    report = nodes.view("gpu-1").report
    assert report is not None
    (found,) = [each.result for each in report.findings if each.check == "gpu-ecc"]
    assert found.remedy is Remedy.RESET and nodes.log == []


@pytest.mark.waits
def test_the_metrics_of_the_node_are_in_a_file_until_the_agent_stops(nodes: Nodes, tmp_path: Path):
    file = tmp_path / "metrics" / NAME
    file.parent.mkdir()
    file.write_text("left 1\n")
    agent = nodes.start("gpu-1", "--metrics", str(file.parent))
    write_telemetry(nodes.telemetry("gpu-1"), with_gpu(healthy("gpu-1", 2, "h100"), 1, temperature_c=91.5))
    nodes.until(lambda: file.exists() and " 91.5\n" in file.read_text())
    assert "left" not in file.read_text()
    agent.terminate()
    assert agent.wait(timeout=20) == 0
    assert os.listdir(file.parent) == []


def test_orders_are_carried_out(nodes: Nodes):
    nodes.only_gpu_checks()
    nodes.start("gpu-1")
    nodes.start("gpu-2")
    nodes.until(lambda: all(nodes.verdicts(node) for node in ("gpu-1", "gpu-2")))
    answers = []
    for do, arguments in (("evidence", {}), ("check", {"context": "prolog"})):
        nodes.agents.order("gpu-1", do, answers.append, timeout_s=60, arguments=arguments)
    nodes.until(lambda: len(answers) == 2)
    assert [answer.error for answer in answers] == ["", ""]
    (files,) = [answer.files for answer in answers if answer.files]
    assert {"findings.json", "telemetry.json", "dmesg.txt", "ps.txt", "nvidia-smi.txt"} <= set(files)
    assert "GPU-" in files["telemetry.json"] and "node-agent" in files["ps.txt"]
    assert all(nodes.view(node).presence is Presence.CONNECTED for node in ("gpu-1", "gpu-2"))


@pytest.mark.cluster  # it needs no cluster, but four Pythons that import torch
def test_validation_with_a_partner_leaves_no_process(nodes: Nodes):
    """torch is loaded by processes that end afterwards, so the agents stay small."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    nodes.only_gpu_checks()
    agents = [nodes.start("gpu-1").pid, nodes.start("gpu-2").pid]
    nodes.until(lambda: all(nodes.verdicts(node) for node in ("gpu-1", "gpu-2")))
    proofs: list[tuple[OrderAnswer, tuple[Finding, ...]]] = []
    validate_node(nodes.agents, "gpu-1", "gpu-2", lambda answer, findings: proofs.append((answer, findings)))
    nodes.until(lambda: proofs, 170)
    assert proofs[0][0].end is OrderEnd.ANSWERED
    found = {each.check: each.result for each in proofs[0][1]}
    own = ["load-product", "load-memory", "load-loopback", "load-collective", "pair", "pair-collective"]
    assert {name: found[name].text for name in own if found[name].verdict is not Verdict.PASSED} == {}
    assert found["gpu-count"].verdict is Verdict.PASSED
    assert "all-reduce of 16 MiB by 2 ranks with gloo: right, " in found["pair-collective"].text
    nodes.until(lambda: all(len(descendants(pid)) == 1 for pid in agents))  # only the process of the checks is left
    assert all(memory_kib(pid, "VmRSS:", "status") <= 30 << 10 for pid in agents)
    validate_node(nodes.agents, "gpu-1", "gpu-2", lambda answer, findings: proofs.append((answer, findings)))
    # Now the processes of an order and of torch run, too
    nodes.until(lambda: all(len(descendants(pid)) >= 3 for pid in agents))
    nodes.processes["gpu-1"].kill()
    nodes.processes["gpu-1"].wait()
    nodes.until(lambda: len(marked(str(nodes.folder))) == 2)  # the other agent and its checks are left


def test_neither_agent_nor_checks_load_heavy_libraries():
    code = (
        "import pathlib, sys; from dalsegno.node_agent.agent import main;"
        "from dalsegno.node_agent.orders import OrderHandlers;"
        "checks = OrderHandlers('gpu-1', 'b', pathlib.Path('/dev/null')).continuous_checks({});"
        "list(checks.run_due(frozenset())); checks.gpus();"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    env = {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "PATH": os.defpath, "SLURM_CONF": "/dev/null"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert HEAVY & set(done.stdout.split()) == set()


def test_options_are_parsed_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good = ["--node", "gpu-1", "--controller", "head:6816", "--secret", "/s", "--boot-id", "b1"]
    assert parse_options(good) == NodeAgentOptions("gpu-1", "head", 6816, Path("/s"), "b1")
    (tmp_path / "boot").write_text("b2\n")
    assert parse_options([*good[:-1], str(tmp_path / "boot")]).boot == "b2"
    assert parse_options([*good[:3], "[::1]:6816", *good[4:]]).host == "::1"
    assert parse_options([*good, "--metrics", "/m"]).metrics == Path("/m")
    for bad in (
        [],
        good[:-2],
        [*good, "--more", "1"],
        [*good, "--metrics", "relative"],
        [*good[:3], "head", *good[4:]],
        [*good[:3], "head:99999", *good[4:]],
        ["--node", "../x", *good[2:]],
        [*good[:-1], str(tmp_path / "none")],
        good,  # the file with the secret does not exist
    ):
        assert main(bad) in (1, 2)
        assert "cannot start: " in capsys.readouterr().err
