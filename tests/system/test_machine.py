"""Tests of facts about the machine."""

from dalsegno.system.machine import gpu_files


def test_gpu_files_are_sorted_by_number():
    names = ["null", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia0"]
    assert gpu_files(names) == ("/dev/nvidia0", "/dev/nvidia2", "/dev/nvidia10")
