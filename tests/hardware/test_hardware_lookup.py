"""Finding hardware by the names people use."""

import pytest

from dalsegno.errors import NotThere
from dalsegno.hardware import closest, did_you_mean, find_fabric, find_gpu, find_instance, gpu_of


def test_hyperpods_name_is_the_same_machine():
    assert find_instance("ml.p5.48xlarge") == find_instance("p5.48xlarge")


def test_a_misspelt_instance_type_is_guessed():
    with pytest.raises(NotThere) as caught:
        find_instance("p5.48xlarg")
    assert caught.value.what == "the catalog has no instance type `p5.48xlarg`"
    assert caught.value.hint == "did you mean `p5.48xlarge`?"


def test_case_does_not_hide_a_near_name():
    with pytest.raises(NotThere) as caught:
        find_instance("bm.gpu.h100.8")
    assert caught.value.hint == "did you mean `BM.GPU.H100.8`?"


def test_a_name_like_nothing_gets_no_guess():
    with pytest.raises(NotThere) as caught:
        find_instance("zzz")
    assert caught.value.hint == ""


def test_a_gpu_is_found_by_slurms_type_and_the_larger_one_is_meant():
    assert find_gpu("h100").memory_gib == 80
    assert find_gpu("A100").name == "a100-80"
    assert find_gpu("a100-40").slurm_type == "a100"


def test_the_gpu_inside_an_instance():
    h100 = gpu_of(find_instance("p5.4xlarge"))
    assert h100 is not None
    assert h100.slurm_type == "h100"
    assert gpu_of(find_instance("m5.large")) is None


def test_a_fabric_says_what_nccl_should_use():
    assert find_fabric(find_instance("p5.48xlarge").fabric).nccl_net == "aws-ofi-nccl"


def test_the_closest_of_some_names():
    assert closest("patitions", ["partitions", "name"]) == "partitions"
    assert did_you_mean("qqq", ["partitions"], "say something") == "say something"
