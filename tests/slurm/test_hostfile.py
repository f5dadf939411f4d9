"""Host files for mpirun, from a job's environment or from Slurm's nodes."""

from __future__ import annotations

import json

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.slurm.facts import NodeFlag, NodeInfo, NodeState
from dalsegno.slurm.hostfile import RDMA_SUFFIX, lines_of_job, lines_of_nodes, render_hostfile

NODES = (
    NodeInfo("compute-1", NodeState.IDLE, partitions=("train",), gpus=8, cpus=224),
    NodeInfo("compute-2", NodeState.IDLE, frozenset({NodeFlag.DRAIN}), partitions=("train",), gpus=8, cpus=224),
    NodeInfo("cpu-1", NodeState.ALLOCATED, partitions=("cpu",), cpus=16),
)
JOB = {"SLURM_JOB_NODELIST": "compute-permanent-node-[789,844]", "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "64"}


def test_job_gets_its_own_nodes_in_the_order_of_slurm():
    lines = lines_of_job(JOB)
    assert lines is not None
    assert render_hostfile(lines) == "compute-permanent-node-789\ncompute-permanent-node-844\n"
    assert render_hostfile(lines[:1], slots=True) == "compute-permanent-node-789 slots=8\n"
    rdma = render_hostfile(lines[:1], suffix=RDMA_SUFFIX)
    assert rdma == "compute-permanent-node-789-rdma.local.rdma\n", "as in the stack's own hostfile.rdma"
    assert lines_of_job({}) is None


def test_outside_of_a_job_the_nodes_in_service_are_listed():
    assert render_hostfile(lines_of_nodes(NODES), slots=True) == "compute-1 slots=8\ncpu-1 slots=16\n"
    assert render_hostfile(lines_of_nodes(NODES, "train")) == "compute-1\n"


def test_empty_host_file_is_never_written():
    with pytest.raises(DalsegnoError, match="partition `gpu`"):
        lines_of_nodes(NODES, "gpu")
    with pytest.raises(DalsegnoError, match="no node is in service"):
        lines_of_nodes(NODES[1:2])


def test_command_prints_the_nodes_of_its_job(command, monkeypatch, tmp_path):
    for name, value in {**JOB, "SLURM_CONF": "/nowhere", "DALSEGNO_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    done = command("nodes", "hostfile", "--slots")
    expected = "compute-permanent-node-789 slots=8\ncompute-permanent-node-844 slots=8\n"
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr
    assert json.loads(command("nodes", "hostfile", "--json").stdout)[1]["name"] == "compute-permanent-node-844"
    refused = command("nodes", "hostfile", "--rdma")
    assert refused.returncode == 1 and "only nodes of OCI's HPC stack" in refused.stderr
