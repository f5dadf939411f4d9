"""What we read off a machine."""

from dalsegno.system.machine import freezer_mount, gpu_files

MOUNTS = """tmpfs /sys/fs/cgroup tmpfs rw 0 0
cgroup /sys/fs/cgroup/cpu cgroup rw,relatime,cpu 0 0
cgroup /sys/fs/cgroup/freezer cgroup rw,relatime,freezer 0 0
"""


def test_the_freezer_is_found_among_the_mounts():
    assert freezer_mount(MOUNTS) == "/sys/fs/cgroup/freezer"
    assert freezer_mount("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n") == ""


def test_gpus_are_numbered_devices_in_the_order_of_their_numbers():
    names = ["null", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia0"]
    assert gpu_files(names) == ("/dev/nvidia0", "/dev/nvidia2", "/dev/nvidia10")
