"""A run gets the variables of its nodes' fabric, and `dalsegno why` explains each of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.hardware.job_variables import variables_for
from dalsegno.runs.submit.plan import PartitionFacts, partitions_seen, plan_run
from dalsegno.runs.submit.prepare import first_status, prepare_run, read_plan
from dalsegno.slurm.facts import NodeInfo, NodeState
from dalsegno.slurm.parse.nodes import PartitionInfo
from tests.conftest import Command
from tests.submit.runs import HEAD, asked

P5 = replace(HEAD, partitions=(PartitionFacts("gpu", default=True, nodes=8, cpus=192, gpus=8, instance="p5.48xlarge"),))


def names(cluster, **request) -> set[str]:
    return {each.name for each in plan_run(asked(**request), cluster, "train-x").variables}


def test_a_run_on_p5_gets_the_variables_of_efa():
    assert {"FI_PROVIDER", "NCCL_BUFFSIZE"} <= names(P5)


def test_variable_that_the_request_or_submission_sets_is_not_added():
    assert "FI_PROVIDER" not in names(P5, env=(("FI_PROVIDER", "tcp"),))
    assert "FI_PROVIDER" not in names(replace(P5, environ=("FI_PROVIDER",)))


def test_virtual_hosts_have_no_fabric_whatever_their_instance_type():
    assert names(replace(P5, fabric=False)) == set()


def test_the_instance_type_may_be_named_where_slurm_does_not_know_it():
    unknown = replace(P5, partitions=(replace(P5.partitions[0], instance=""),))
    assert names(unknown) == set()
    assert "NCCL_IB_HCA" in names(replace(unknown, instance="BM.GPU.H100.8"))


@pytest.mark.parametrize(("second", "instance"), [("p5.48xlarge", "p5.48xlarge"), ("p4d.24xlarge", "")])
def test_a_partition_has_an_instance_type_if_all_its_nodes_have_it(second: str, instance: str):
    nodes = [
        NodeInfo(f"n{at}", NodeState.IDLE, partitions=("gpu",), cpus=8, features=("dynamic", each))
        for at, each in enumerate(["p5.48xlarge", second])
    ]
    found = partitions_seen([PartitionInfo("gpu", nodes=("n0", "n1"))], nodes)
    assert found[0].instance == instance


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that prepares a run on nodes of an instance type, and returns its name."""
    home = tmp_path / "runs"
    monkeypatch.setenv("DALSEGNO_RUNS", str(home))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))

    def prepare(instance: str) -> str:
        partitions = (replace(P5.partitions[0], instance=instance),)
        plan = plan_run(asked(), replace(P5, partitions=partitions, runs_folder=str(home)), "train-k3f9x")
        run = prepare_run(plan, {}, first_status(plan, "ada", 100.0), home)
        assert read_plan(run).variables == plan.variables
        return plan.run

    return prepare


@pytest.fixture
def run_on_p5(prepared: Callable[[str], str]) -> str:
    return prepared("p5.48xlarge")


def test_why_explains_each_variable_with_its_source(run_on_p5: str, command: Command):
    shown = command("why", run_on_p5).stdout
    assert "FI_PROVIDER=efa" in shown
    assert "libfabric uses EFA or fails" in shown
    assert "AWS EFA cheatsheet" in shown


@pytest.mark.parametrize("shape", ["BM.GPU.B300.8", "BM.GPU.GB200.4"])
def test_why_explains_each_variable_of_a_shape_with_rdma_cards(
    shape: str, prepared: Callable[[str], str], command: Command
):
    shown = command("why", prepared(shape)).stdout
    wanted = variables_for(shape)
    assert "NCCL_IB_HCA" in {each.name for each in wanted}
    assert [each for each in wanted if f"{each.name}={each.value}" not in shown or each.reason not in shown] == []


def test_the_json_of_why_has_the_variables(run_on_p5: str, command: Command):
    found = json.loads(command("why", run_on_p5, "--json").stdout)["variables"]
    assert {"name", "value", "of", "reason", "source"} == set(found[0])
