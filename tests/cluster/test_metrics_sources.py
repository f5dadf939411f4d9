"""Tests of the metrics of nodes, runs and recovery on a real cluster. The metrics must match what happened there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from dalsegno.health.telemetry import read_telemetry, with_gpu, write_telemetry
from dalsegno.observe.exposition import Family, render
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.journal.metrics import RecoveryMetrics, RecoveryScope, list_runs
from dalsegno.recovery.watch import JOURNAL
from dalsegno.runs.metrics import RunMetrics
from dalsegno.targets.local.folder import Folder
from tests.cluster.conftest import Cli, at_home, taken_down
from tests.cluster.runs import IN_STEP, LONG_S, QUICK, Run
from tests.waiting import eventually

FILE = """
name: one
target: local
partitions:
  - {name: train, nodes: 3, spares: 1, gpus: 2, gpu_type: h100, cpus: 4, memory: 1G, default: true}
slurm: {accounting: false}
health:
  per_hour: 100
  max_out: 50%
  checks: {gpu-temperature: off, pcie-width: off, pair-collective: off, load-product: off, load-memory: off}
monitoring: {enabled: true}
"""
# In both scripts, rank 1 is slower than the others, which wait for it in every step.
SLOW_SOCKETS = "from dalsegno.train import report\n" + IN_STEP.replace(
    "time.sleep(0.15)",
    """busy_s = 0.05 if rank == 1 else 0.01
    report(step, loss=1 / step, samples=2, tokens=512, busy_s=busy_s, last=done != b".")
    time.sleep(busy_s)""",
)
SLOW_DDP = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from dalsegno.train import Checkpointer

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
ckpt = Checkpointer(sys.argv[2], model=model, optimizer=optimizer)
for step in ckpt.steps(100000):
    time.sleep(0.05 if dist.get_rank() == 1 else 0.01)
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    stop = torch.tensor([float(os.path.exists(sys.argv[1]))])
    dist.broadcast(stop, 0)
    ckpt.done(step, loss=loss, samples=2, tokens=512)
    if stop:
        break
dist.destroy_process_group()
"""
pytestmark = [pytest.mark.timeout(600), pytest.mark.waits]


@pytest.fixture(scope="module")
def cluster(cache: Path) -> Iterator[Cli]:
    with taken_down(at_home(cache)) as cli:
        cli.ok("up", cli.file(FILE))
        yield cli


def folder_of(cli: Cli) -> Folder:
    return Folder(cli.home / "clusters/one")


def samples(families: Iterable[Family]) -> dict[str, float]:
    return parsed(render(families).decode())


def parsed(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def node_samples(cli: Cli, node: str) -> dict[str, float]:
    return parsed((folder_of(cli).node_metrics(node) / "dalsegno.prom").read_text())


def find(values: dict[str, float], start: str, *parts: str) -> float:
    (found,) = [value for name, value in values.items() if name.startswith(start) and all(p in name for p in parts)]
    return found


def test_a_hot_gpu_is_in_the_file_of_its_node(cluster: Cli):
    eventually(lambda: find(node_samples(cluster, "train-1"), "DCGM_FI_DEV_GPU_TEMP{", 'gpu="0"') == 34)
    file = folder_of(cluster).node_metrics("train-1") / "dalsegno.prom"
    assert (file.stat().st_uid, file.stat().st_mode & 0o777) == (os.geteuid(), 0o644)
    assert file.parent.stat().st_mode & 0o777 == 0o755
    cluster.ok("inject", "gpu-hot", "train-1", "--gpu", "1")
    try:
        eventually(lambda: find(node_samples(cluster, "train-1"), "DCGM_FI_DEV_GPU_TEMP{", 'gpu="1"') == 96)
        found = node_samples(cluster, "train-1")
        assert find(found, "DCGM_FI_DEV_GPU_TEMP{", 'gpu="0"', 'Hostname="train-1"') == 34
        assert find(found, "dalsegno_fabric_port_up{", 'device="sim0"') == 1
    finally:
        cluster.ok("inject", "--clear", "train-1")


@pytest.mark.parametrize("framework", ["sockets", pytest.param("torch", marks=pytest.mark.long)])
def test_a_run_shows_its_slow_rank_and_recovers_from_a_power_cut(cluster: Cli, framework: str):
    if framework == "torch":
        pytest.importorskip("torch")
    runs = RunMetrics(lambda: list_runs(folder_of(cluster).runs))
    policy = Policy(spares=frozenset({"train-4"}))
    nodes = ("train-1", "train-2", "train-3", "train-4")
    recovery = RecoveryMetrics(folder_of(cluster).root / JOURNAL, lambda: RecoveryScope(policy, {"train": nodes}))
    work = cluster.home / framework
    args = (str(work / "stop"), str(work / "ckpt"))
    options, script = ((), SLOW_DDP) if framework == "torch" else (QUICK, SLOW_SOCKETS)
    run = Run.start(cluster, work, *options, "-N", "3", "--nproc-per-node", "1", script=script, args=args)

    def seen() -> dict[str, float]:
        return samples(runs.collect())

    run.wait_for(lambda: find(seen(), "training_rank_step_ratio{", 'rank="1"') > 1.5, LONG_S)
    found = seen()
    assert find(found, "training_rank_step_ratio{", 'rank="0"') <= 1.1
    assert find(found, "training_run_info{", f'run="{run.id}"', 'phase="running"') == 1
    assert 0.04 < find(found, "training_step_seconds{") < 2
    assert find(found, "training_tokens_per_second{") == pytest.approx(
        256 * find(found, "training_samples_per_second{")
    )
    run.wait_for(lambda: run.status.slow_rank, LONG_S)
    _check_slow_rank(cluster, run)
    before = find(found, "training_step{")
    cluster.ok("inject", "power-off", "train-3")
    run.wait_for(lambda: find(seen(), "dalsegno_recovery_resume_seconds_count") == 1, LONG_S)
    run.wait_for(lambda: find(seen(), "training_step{") > before and find(seen(), "training_generation{") >= 2, LONG_S)
    assert find(seen(), "training_lost_nodes_total{") == 1
    assert 0 < find(seen(), "dalsegno_recovery_resume_seconds_sum") < 60
    eventually(lambda: find(samples(recovery.collect()), "dalsegno_recovery_replace_seconds_count") >= 1, LONG_S)
    found = samples(recovery.collect())
    assert find(found, "dalsegno_recovery_detect_seconds_count") == 1
    assert 0.4 < find(found, "dalsegno_recovery_detect_seconds_sum") < 60
    assert find(found, "dalsegno_recovery_drain_seconds_count") >= 1
    assert find(found, "dalsegno_recovery_events_total{", 'kind="setdown"', 'stage="done"') >= 1
    _check_evidence(cluster, run)
    assert run.finish() == 0
    assert find(seen(), "training_run_info{", 'phase="ended"') == 1


def _check_evidence(cluster: Cli, run: Run) -> None:
    """Check that a reduced clock, lost PCIe lanes and retransmissions of the slow rank's node are named."""
    node = eventually(lambda: run.status.slow_rank, LONG_S).node
    file = folder_of(cluster).telemetry(node)
    cluster.ok("inject", "net-loss", node, "--percent", "10")
    before = read_telemetry(file)
    write_telemetry(file, with_gpu(before, 0, clock_mhz=660, utilization_percent=100, pcie_width=8))
    readings = r"clock 700 MHz \(others 300 MHz\), .*PCIe lanes 8 \(others 16\)"  # clocks are sent in steps of 100
    evidence = re.compile(
        rf"rank 1 on {node} takes .*; GPU 0: {readings}.*; gpu-clocks: GPU 0 .*runs at 660 of 1980 MHz"
        r".*network: \d+ of \d+ TCP segments were retransmitted"
    )
    said = ""

    def named() -> re.Match[str] | None:
        nonlocal said
        said = cluster.run("status").err
        return evidence.search(said)

    try:
        run.wait_for(named, LONG_S)
    finally:
        print(said)
        write_telemetry(file, before)
        cluster.ok("inject", "--clear", node)


def _check_slow_rank(cluster: Cli, run: Run) -> None:
    """Check that `status` and `why` show the slow rank with the readings of its node, and that `why` gives a hint."""
    node = run.nodes[1]
    slow = f"rank 1 on {node} takes "
    evidence = re.compile(rf"{slow}.*; GPU 0: .*temperature 34 °C \(others 34 °C\)")
    (warning,) = [line for line in cluster.run("status").err.splitlines() if slow in line]
    assert f"run {run.id}: {slow}" in warning and evidence.search(warning), warning
    why = cluster.run("why", run.id)
    (verdict,) = [line for line in why.out.splitlines() if "is training" in line]
    assert evidence.search(verdict) and f"dalsegno why {node}" in why.err, why
    assert [entry["text"] for entry in run.journal("note") if slow in entry["text"]]
