"""The variables that jobs need on an instance type."""

from __future__ import annotations

import re

import pytest

from dalsegno.hardware import fabrics, instances
from dalsegno.hardware.job_variables import find_instance_type, job_variables, missing_variables, variables_for


def values(instance: str) -> dict[str, str]:
    return {each.name: each.value for each in variables_for(instance)}


def test_every_row_names_a_fabric_or_an_instance_type_and_gives_reason_and_source():
    for each in job_variables():
        assert each.required_by in fabrics() or each.required_by in instances(), each
        assert re.fullmatch(r"(NCCL|FI)_[A-Z0-9_]+", each.name), each
        assert each.value and each.reason and each.source, each


def test_no_variable_is_there_twice_for_the_same_machines():
    keys = [(each.required_by, each.name) for each in job_variables()]
    assert len(keys) == len(set(keys))


def test_p5_gets_what_the_sample_job_of_aws_sets():
    assert values("p5.48xlarge") == {
        "FI_PROVIDER": "efa",
        "FI_EFA_FORK_SAFE": "1",
        "FI_EFA_USE_HUGE_PAGE": "0",
        "NCCL_BUFFSIZE": "8388608",
        "NCCL_P2P_NET_CHUNKSIZE": "524288",
    }


def test_hyperpods_name_of_an_instance_type_means_the_same():
    assert values("ml.p5.48xlarge") == values("p5.48xlarge")


def test_only_older_instances_need_device_rdma():
    assert values("p4d.24xlarge")["FI_EFA_USE_DEVICE_RDMA"] == "1"
    assert "FI_EFA_USE_DEVICE_RDMA" not in values("p5.48xlarge")


def test_oci_shapes_get_the_cards_of_the_cluster_network():
    a100 = values("BM.GPU4.8")
    assert a100["NCCL_IB_GID_INDEX"] == "3"
    assert a100["NCCL_IB_QPS_PER_CONNECTION"] == "4"
    cards = a100["NCCL_IB_HCA"].removeprefix("=").split(",")
    assert len(set(cards)) == 16 and not {"mlx5_4", "mlx5_5"} & set(cards)


ROCE_GPUS = [each.name for each in instances().values() if each.fabric == "roce" and each.gpus]


@pytest.mark.parametrize("shape", ROCE_GPUS)
def test_every_gpu_shape_with_rdma_cards_names_them(shape: str):
    found = values(shape)
    assert {"NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TC", "NCCL_IB_SL"} <= set(found)
    cards = found["NCCL_IB_HCA"].removeprefix("=").split(",")
    assert found["NCCL_IB_HCA"].startswith("="), "without `=`, mlx5_1 also means mlx5_10"
    assert len(set(cards)) == len(cards) == instances()[shape].nics


def test_b300_has_the_settings_of_the_reference_job():
    cards = [0, 1, *range(7, 15), *range(16, 22)]
    assert values("BM.GPU.B300.8") == {
        **values("BM.GPU.H200.8"),
        "NCCL_IB_HCA": "=" + ",".join(f"mlx5_{number}" for number in cards),
    }


@pytest.mark.parametrize("instance", ["BM.GPU.GB200.4", "p6e-gb200.36xlarge"])
def test_gb200_uses_nvlink_between_nodes(instance: str):
    found = values(instance)
    assert (found["NCCL_MNNVL_ENABLE"], found["NCCL_NVLS_ENABLE"]) == ("1", "1")


def test_no_row_names_a_file_because_paths_differ_between_images_and_containers():
    assert [each for each in job_variables() if "/" in each.value] == []


@pytest.mark.parametrize("name", ["m5.large", "g5.xlarge", "", "unknown.type"])
def test_machines_on_plain_tcp_and_unknown_ones_get_nothing(name: str):
    assert variables_for(name) == ()


def test_variable_that_is_already_set_is_kept_even_if_it_is_empty():
    left = {each.name for each in missing_variables("p5.48xlarge", {"FI_PROVIDER": ""}, {"NCCL_BUFFSIZE": "1"})}
    assert left == {"FI_EFA_FORK_SAFE", "FI_EFA_USE_HUGE_PAGE", "NCCL_P2P_NET_CHUNKSIZE"}


def test_the_instance_type_is_found_among_the_features_that_parallelcluster_sets():
    assert find_instance_type(["static", "p5.48xlarge", "gpu", "efa"]) == "p5.48xlarge"
    assert find_instance_type(["gpu", "nvlink"]) == ""
