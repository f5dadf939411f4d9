"""The requests of a run to Slurm: the allocation, the one-node job that joins, the next job."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.runs.submit.plan import (
    ClusterFacts,
    PartitionFacts,
    RunPlan,
    partitions_of,
    partitions_seen,
    plan_join,
    plan_next,
    salloc_argv,
)
from dalsegno.runs.submit.values import Gpus, NodeCount
from dalsegno.slurm.facts import NodeInfo, NodeState
from dalsegno.slurm.parse.nodes import PartitionInfo
from dalsegno.spec.facts import Cluster, Node, Partition, facts_from_json, facts_to_json
from tests.submit.runs import FOREIGN, HEAD, asked, options, planned


def refused(cluster: ClusterFacts = HEAD, **fields: Any) -> str:
    with pytest.raises(UsageError) as fault:
        planned(cluster, **fields)
    return fault.value.what


def test_run_on_a_head_holds_an_allocation_without_a_batch_script() -> None:
    plan = planned(HEAD, nodes=4, spares=1, gpus_per_node=Gpus(8), time_limit_s=7200)
    assert plan.on_head
    assert salloc_argv(plan) == [
        "salloc",
        "--no-shell",
        "--no-kill",
        "--job-name=train-k3f9",
        "--comment=dalsegno:main",
        "--nodes=5",
        "--ntasks-per-node=1",
        "--cpus-per-task=192",
        "--gpus-per-node=8",
        "--time=02:00:00",
        "--signal=USR2@120",
    ]


def test_all_options_are_passed_to_slurm() -> None:
    plan = planned(
        partition="train,spot", account="ml", qos="high", constraint="a&b", exclude=("n3", "n1", "n2"),
        memory_mib=1024, cpus_per_task=3, nproc_per_node=2, signal_lead_s=300, sbatch_args=("--nice=5",),
    )  # fmt: skip
    found = options(salloc_argv(plan))
    assert found == {
        "--no-shell": "", "--no-kill": "", "--job-name": "train-k3f9", "--comment": "dalsegno:main", "--nodes": "1",
        "--ntasks-per-node": "1", "--cpus-per-task": "6", "--mem": "1024M", "--signal": "USR2@300",
        "--partition": "train,spot", "--account": "ml", "--qos": "high", "--constraint": "a&b",
        "--exclude": "n[3,1-2]", "--nice": "5",
    }  # fmt: skip
    assert salloc_argv(plan)[-1] == "--nice=5"  # the user's options come last


@pytest.mark.parametrize(
    ("nodes", "spares", "asks"),
    [(NodeCount(4, 4), 0, "4"), (NodeCount(4, 4), 1, "5"), (NodeCount(1, 4), 0, "1-4"), (NodeCount(1, 4), 1, "1-5")],
)
def test_fixed_run_waits_for_spares_and_elastic_run_does_not(nodes: NodeCount, spares: int, asks: str) -> None:
    plan = planned(nodes=nodes, spares=spares)
    assert options(salloc_argv(plan))["--nodes"] == asks
    assert (plan.shape.min_nodes, plan.shape.max_nodes) == (nodes.min, nodes.max)


@pytest.mark.parametrize(
    ("fields", "cpus"),
    [
        ({"gpus_per_node": Gpus(8)}, 192),  # all GPUs, so all CPUs
        ({"gpus_per_node": Gpus(2)}, 48),
        ({"gpus_per_node": Gpus(8), "nproc_per_node": 5}, 190),
        ({"gpus_per_node": Gpus(8), "cpus_per_task": 4}, 32),
        ({"nproc_per_node": 3}, 3),
    ],
)
def test_cpus_of_an_agent_are_its_share_of_the_node(fields: dict[str, Any], cpus: int) -> None:
    assert planned(HEAD, **fields).job.cpus_per_task == cpus


def test_trainium_is_requested_by_its_gres_name() -> None:
    cluster = ClusterFacts(partitions=(PartitionFacts("trn", default=True, nodes=2, cpus=128, gpus=16, gres="neuron"),))
    assert options(salloc_argv(planned(cluster, gpus_per_node=Gpus(16))))["--gres"] == "neuron:16"


@pytest.mark.parametrize(
    ("asks_s", "job", "goes_on"), [(3600, "01:00:00", False), (172_800, "1-00:00:00", True), (0, "1-00:00:00", True)]
)
def test_run_longer_than_the_partition_limit_continues_in_further_jobs(asks_s: int, job: str, goes_on: bool) -> None:
    plan = planned(HEAD, time_limit_s=asks_s, gpus_per_node=Gpus(8))
    assert options(salloc_argv(plan))["--time"] == job
    note = "partition `train` limits jobs to 1-00:00:00; the run continues in further jobs"
    assert plan.notes == ((note,) if goes_on else ())


def test_default_time_is_the_limit_of_the_partition_and_unlimited_is_zero() -> None:
    assert "--time" not in options(salloc_argv(planned()))
    assert options(salloc_argv(planned(time_limit_s=0)))["--time"] == "0"


def test_notes_mention_unused_gpus_and_optional_spares() -> None:
    assert planned(HEAD, nodes=NodeCount(1, 4), spares=1).notes == (
        "nodes of partition `train` have 8 h100 GPUs but the run requests none; to use them: `--gpus-per-node 8`",
        "an elastic run does not wait for its spares",
    )


def test_impossible_request_is_refused_before_submission() -> None:
    assert refused(partition="trian") == "there is no partition `trian`"
    assert refused(nodes=9) == "the run requests 9 nodes, but partition `train` has 8"
    assert refused(nodes=6, spares=1) == (
        "the run requests 7 nodes (with 1 spare), but partition `train` allows a job at most 6"
    )
    assert refused(partition="cpu", gpus_per_node=Gpus(1)) == (
        "the run requests 1 GPUs per node, but nodes of partition `cpu` have none"
    )
    assert refused(partition="cpu", nproc_per_node=2, cpus_per_task=2) == (
        "a node would need 4 CPUs, but nodes of partition `cpu` have 2"
    )
    assert refused(sbatch_args=("--requeue",)) == "`--requeue` is for batch jobs only"
    assert refused(name="x", signal_lead_s=65_000, time_limit_s=65_000) == (
        "a time limit of 65000 s leaves no time before the signal 65000 s ahead of it"
    )


def test_run_id_is_checked_like_a_name() -> None:
    from dalsegno.runs.submit.plan import plan_run

    with pytest.raises(UsageError, match="invalid run name"):
        plan_run(asked(), FOREIGN, "--uid=0")


def test_unknown_cluster_leaves_limits_to_slurm() -> None:
    plan = planned(nodes=1000, gpus_per_node=Gpus(64), partition="whatever")
    assert (plan.job.cpus_per_task, plan.notes, plan.on_head) == (64, (), False)


def test_folders_and_python_are_relative_to_the_working_folder() -> None:
    plan = planned(chdir="/home/ada", venv="env", output="out")
    assert (plan.folder, plan.python) == ("/home/ada/out/train-k3f9", "/home/ada/env/bin/python")
    assert planned(HEAD).folder == "/var/lib/dalsegno/runs/train-k3f9"
    assert planned(conda="/opt/conda/envs/x").python == "/opt/conda/envs/x/bin/python"


def test_joining_node_excludes_suspects_and_members() -> None:
    plan = planned(HEAD, nodes=4, spares=1, exclude=("n9",), time_limit_s=7200)
    joining = plan_join(plan, suspects=["n3"], members=["n10", "n1", "n2"])
    changed = {"--comment": "dalsegno:join", "--nodes": "1", "--exclude": "n[1-3,9-10]"}
    assert options(salloc_argv(joining)) == {**options(salloc_argv(plan)), **changed}
    assert (joining.run, joining.shape) == (plan.run, plan.shape)


def test_join_of_a_run_in_its_second_job_has_no_dependency() -> None:
    assert plan_join(plan_next(planned())).job.dependency == ""


def test_run_of_srun_tasks_cannot_take_further_nodes() -> None:
    with pytest.raises(DalsegnoError, match="cannot take further nodes: its framework is plain"):
        plan_join(planned(framework="plain"))


def test_next_job_waits_until_no_other_of_its_name_is_left() -> None:
    plan = planned(HEAD, nodes=4)
    found, following = options(salloc_argv(plan)), options(salloc_argv(plan_next(plan)))
    assert following == {**found, "--comment": "dalsegno:next", "--dependency": "singleton"}


def test_plan_survives_the_round_trip() -> None:
    plan = plan_next(planned(HEAD, nodes=4, gpus_per_node=Gpus(8, "h100"), env=(("A", "b"),), framework="mpi"))
    assert facts_from_json(RunPlan, json.loads(json.dumps(facts_to_json(plan)))) == plan


def test_partitions_are_read_from_a_cluster_file() -> None:
    nodes = (Node("a1", 8, 1, 4, "l4"), Node("a2", 4, 1, 2, "l4"), Node("a3", 1, 1, spare=True), Node("b1", 2, 1))
    partitions = (Partition("a", ("a1", "a2", "a3"), time_limit_min=60, default=True), Partition("b", ("b1",)))
    assert partitions_of(Cluster("c", "local", nodes, partitions)) == (
        PartitionFacts("a", default=True, nodes=2, cpus=4, gpus=2, gpu_type="l4", time_limit_s=3600),
        PartitionFacts("b", nodes=1, cpus=2),
    )


def test_partitions_are_read_from_slurm() -> None:
    state = (NodeState.IDLE, frozenset[Any]())
    seen = PartitionInfo("a", default=True, time_limit_s=60, nodes={"n1": state, "n2": state})
    nodes = [NodeInfo("n1", NodeState.IDLE, cpus=8, gpus=1, gpu_type="l4"), NodeInfo("n2", NodeState.IDLE, cpus=4)]
    assert partitions_seen([seen], nodes) == (PartitionFacts("a", default=True, nodes=2, cpus=4, time_limit_s=60),)
