"""Requests and clusters for plans."""

from __future__ import annotations

from typing import Any

from dalsegno.runs.submit.plan import ClusterFacts, PartitionFacts, RunPlan, plan_run
from dalsegno.runs.submit.request import RunRequest
from dalsegno.runs.submit.values import NodeCount

GPU_NODES = PartitionFacts(
    "train", default=True, nodes=8, cpus=192, gpus=8, gpu_type="h100", time_limit_s=86_400, max_nodes=6
)
CPU_NODES = PartitionFacts("cpu", nodes=4, cpus=2)
HEAD = ClusterFacts(
    controller=True,
    partitions=(GPU_NODES, CPU_NODES),
    launcher=("/opt/dalsegno/bin/python", "-m", "dalsegno"),
    runs_folder="/var/lib/dalsegno/runs",
    mpi_types=("none", "pmi2", "pmix"),
)
FOREIGN = ClusterFacts(launcher=("/home/ada/venv/bin/python", "-m", "dalsegno"), mpi_types=("none", "pmi2"))


def asked(script: str = "train.py", *, nodes: int | NodeCount = 1, **more: Any) -> RunRequest:
    return RunRequest(script, nodes=NodeCount(nodes, nodes) if isinstance(nodes, int) else nodes, **more)


def planned(cluster: ClusterFacts = FOREIGN, **more: Any) -> RunPlan:
    return plan_run(asked(**more), cluster, "train-k3f9")


def options(argv: list[str]) -> dict[str, str]:
    """Return `--name=value` arguments as a mapping; flags have the value ""."""
    words = (word for word in argv if word.startswith("--"))
    return {name: value for name, _, value in (word.partition("=") for word in words)}
