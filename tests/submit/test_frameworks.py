"""The environment of each process, by framework."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.runs.submit.container import choose_mpi, parse_mpi_types
from dalsegno.runs.submit.frameworks import (
    ProcessLayout,
    framework_env,
    jax_env,
    share_of_devices,
    tensorflow_env,
    torch_env,
)
from dalsegno.runs.torchrun.launch import cpus_per_process

TWO_BY_TWO = ProcessLayout("train-1", ("n1", "n2"), 2, 29_500, restarts=1, max_restarts=3, gpus_per_node=4)


def test_torch_processes_get_the_variables_of_torchrun() -> None:
    assert torch_env(TWO_BY_TWO, 1, {}).whole()[1] == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "default",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "train-1",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_user_settings_of_threads_and_nccl_are_kept() -> None:
    found = torch_env(TWO_BY_TWO, 0, {"OMP_NUM_THREADS": "8", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}).common
    assert (found["OMP_NUM_THREADS"], found["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("8", "0")
    assert "OMP_NUM_THREADS" not in torch_env(ProcessLayout("r", ("n1",), 1, 1), 0, {}).common


@pytest.mark.parametrize(
    ("nproc", "cpus", "found", "threads"),
    [(1, 1, {}, "1"), (1, 8, {}, "8"), (4, 2, {}, "2"), (4, 0, {}, "1"), (4, 8, {"OMP_NUM_THREADS": "3"}, "3")],
)
def test_torch_uses_as_many_threads_as_a_process_has_cpus(
    nproc: int, cpus: int, found: dict[str, str], threads: str
) -> None:
    world = ProcessLayout("r", ("n1",), nproc, 1, cpus_per_process=cpus)
    assert torch_env(world, 0, found).common["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(("task", "nproc", "cpus"), [("8", 1, 8), ("8", 4, 2), ("2", 4, 1), ("", 1, 0), ("x", 1, 0)])
def test_torchrun_uses_the_cpus_of_its_srun_task(task: str, nproc: int, cpus: int) -> None:
    assert cpus_per_process({"SLURM_CPUS_PER_TASK": task}, nproc) == cpus


def test_virtual_local_rank_shows_each_process_one_gpu() -> None:
    world = ProcessLayout("r", ("n1",), 2, 1, role="trainer", virtual_local_rank=True)
    found = torch_env(world, 0, {"CUDA_VISIBLE_DEVICES": "4,5"}).whole()[1]
    assert (found["LOCAL_RANK"], found["CUDA_VISIBLE_DEVICES"], found["ROLE_NAME"]) == ("0", "5", "trainer")
    assert torch_env(world, 0, {}).own[1]["CUDA_VISIBLE_DEVICES"] == "1"
    assert torch_env(world, 0, {"HIP_VISIBLE_DEVICES": "7,8"}).own[0]["HIP_VISIBLE_DEVICES"] == "7"
    with pytest.raises(DalsegnoError, match="no GPU for local rank 1: CUDA_VISIBLE_DEVICES lists 1"):
        torch_env(world, 0, {"CUDA_VISIBLE_DEVICES": "4"})


def test_tensorflow_workers_know_all_addresses_and_their_index() -> None:
    found = tensorflow_env(TWO_BY_TWO, 2, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert json.loads(found["TF_CONFIG"]) == {
        "cluster": {"worker": ["n1:29500", "n1:29501", "n2:29500", "n2:29501"]},
        "task": {"type": "worker", "index": 2},
    }
    assert found["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_ipv6_address_is_written_in_brackets() -> None:
    (worker,) = json.loads(tensorflow_env(ProcessLayout("r", ("fd00::1",), 1, 7), 0, {})["TF_CONFIG"])["cluster"][
        "worker"
    ]
    assert worker == "[fd00::1]:7"


def test_ports_beyond_the_last_are_refused() -> None:
    with pytest.raises(DalsegnoError, match="there are fewer than 2 ports from 65535 on"):
        tensorflow_env(ProcessLayout("r", ("n1",), 2, 65_535), 0, {})


def test_jax_gets_its_coordinator_and_the_variables_of_srun() -> None:
    assert jax_env(TWO_BY_TWO, 1).whole()[1] == {
        "JAX_COORDINATOR_ADDRESS": "n1:29500",
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "3",
        "JAX_LOCAL_DEVICE_IDS": "2,3",
        "SLURM_NTASKS": "4",
        "SLURM_NPROCS": "4",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
    }


def test_single_jax_process_has_all_gpus_of_its_node() -> None:
    assert jax_env(ProcessLayout("r", ("n1",), 1, 1, gpus_per_node=4), 0).own[0]["JAX_LOCAL_DEVICE_IDS"] == "0,1,2,3"
    assert "JAX_LOCAL_DEVICE_IDS" not in jax_env(ProcessLayout("r", ("n1",), 1, 1), 0).own[0]


def test_plain_and_mpi_processes_get_no_variables() -> None:
    for name in ("plain", "mpi"):
        assert framework_env(name, TWO_BY_TWO, 0, {}).whole() == [{}, {}]
    assert framework_env("torch", TWO_BY_TWO, 1, {}).own[0]["RANK"] == "2"
    assert [set(each) for each in framework_env("tensorflow", TWO_BY_TWO, 0, {}).whole()] == [{"TF_CONFIG"}] * 2
    assert framework_env("jax", TWO_BY_TWO, 1, {}).own[0]["SLURM_PROCID"] == "2"


@given(st.integers(1, 5), st.integers(1, 9))
def test_every_worker_has_its_own_address(hosts: int, processes: int) -> None:
    world = ProcessLayout("r", tuple(f"n{at}" for at in range(hosts)), processes, 3000)
    configs = [json.loads(tensorflow_env(world, rank, {})["TF_CONFIG"]) for rank in range(world.size)]
    assert len({config["cluster"]["worker"][config["task"]["index"]] for config in configs}) == world.size
    ranks = [each for group_rank in range(hosts) for each in torch_env(world, group_rank, {}).whole()]
    assert len({(each["GROUP_RANK"], each["LOCAL_RANK"]) for each in ranks}) == world.size


@given(st.integers(1, 16), st.integers(1, 16))
def test_devices_are_shared_only_if_there_are_too_few(devices: int, processes: int) -> None:
    listed = ",".join(map(str, range(devices)))
    shares = [share_of_devices(listed, processes, at).split(",") for at in range(processes)]
    given_out = [device for share in shares for device in share]
    assert len(given_out) == len(set(given_out)) or devices < processes


SLURM_22 = """MPI plugin types are...
\tcray_shasta
\tnone
\tpmi2
\tpmix
specific pmix plugin versions available: pmix_v4
"""
SLURM_20 = """srun: MPI types are...
srun: none
srun: pmix_v2
srun: pmix_v3
srun: pmi2
"""


@pytest.mark.parametrize(
    ("text", "types", "chosen"),
    [
        (SLURM_22, ("cray_shasta", "none", "pmi2", "pmix", "pmix_v4"), "pmix"),
        (SLURM_20, ("none", "pmix_v2", "pmix_v3", "pmi2"), "pmix_v3"),
        ("\tnone\n\tpmi2\n", ("none", "pmi2"), "pmi2"),
    ],
)
def test_mpi_type_is_chosen_from_the_list_of_srun(text: str, types: tuple[str, ...], chosen: str) -> None:
    assert parse_mpi_types(text) == types
    assert choose_mpi(types) == chosen


@pytest.mark.parametrize("types", [(), ("none",)])
def test_slurm_without_mpi_is_reported(types: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="this Slurm cannot start MPI programs"):
        choose_mpi(types)
