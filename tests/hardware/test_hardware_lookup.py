"""Look up hardware by the names that people use."""

import pytest

from dalsegno.errors import NotThere
from dalsegno.hardware import closest, did_you_mean, find_fabric, find_gpu, find_instance, gpu_of


def test_hyperpod_name_finds_the_same_instance():
    assert find_instance("ml.p5.48xlarge") == find_instance("p5.48xlarge")


def test_misspelled_instance_type_gets_a_suggestion():
    with pytest.raises(NotThere) as caught:
        find_instance("p5.48xlarg")
    assert caught.value.what == "the catalog has no instance type `p5.48xlarg`"
    assert caught.value.hint == "did you mean `p5.48xlarge`?"


def test_suggestion_ignores_case():
    with pytest.raises(NotThere) as caught:
        find_instance("bm.gpu.h100.8")
    assert caught.value.hint == "did you mean `BM.GPU.H100.8`?"


def test_unrelated_name_gets_no_suggestion():
    with pytest.raises(NotThere) as caught:
        find_instance("zzz")
    assert caught.value.hint == ""


def test_gpu_is_found_by_slurm_type_as_the_larger_size():
    assert find_gpu("h100").memory_gib == 80
    assert find_gpu("A100").name == "a100-80"
    assert find_gpu("a100-40").slurm_type == "a100"


def test_gpu_of_an_instance_is_found():
    h100 = gpu_of(find_instance("p5.4xlarge"))
    assert h100 is not None
    assert h100.slurm_type == "h100"
    assert gpu_of(find_instance("m5.large")) is None


def test_fabric_names_the_nccl_transport():
    assert find_fabric(find_instance("p5.48xlarge").fabric).nccl_net == "aws-ofi-nccl"


def test_closest_returns_the_most_similar_name():
    assert closest("patitions", ["partitions", "name"]) == "partitions"
    assert did_you_mean("qqq", ["partitions"], "say something") == "say something"
