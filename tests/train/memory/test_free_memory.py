"""Free memory, and the error when it is not enough."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.errors import NotEnoughMemory
from dalsegno.train.memory.free_memory import RESERVE, FreeMemory, check_free_memory, describe_use, read_free_memory
from dalsegno.train.memory.slots import Slots, create
from tests.train.memory.processes import in_child
from tests.train.memory.states import filled

GIB = 1 << 30
CLONE_NEWNS = 0x20000
MEMINFO = "MemTotal:       24000000 kB\nMemAvailable:    8388608 kB\n"


def machine(tmp_path: Path, cgroup: str, files: dict[str, str]) -> FreeMemory:
    """Return the free memory of a machine with these files."""
    contents = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, **files}
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return read_free_memory(tmp_path, tmp_path / "proc", tmp_path / "sys")


def test_machine_memory_counts_without_a_limit(tmp_path: Path) -> None:
    free = machine(tmp_path, "", {})
    assert (free.memory, free.cgroup) == (8 * GIB, None)


def test_tightest_cgroup_v2_limit_counts(tmp_path: Path) -> None:
    free = machine(tmp_path, "0::/job/step\n", {
        "sys/job/memory.max": f"{4 * GIB}\n", "sys/job/memory.current": f"{3 * GIB}\n",
        "sys/job/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        "sys/job/step/memory.max": "max\n", "sys/job/step/memory.current": "5\n",
    })  # fmt: skip
    assert free.cgroup == 2 * GIB


def test_tightest_cgroup_v1_limit_counts(tmp_path: Path) -> None:
    free = machine(tmp_path, "4:cpu,memory:/slurm/job\n1:cpuset:/\n", {
        "sys/memory/slurm/job/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/memory/slurm/job/memory.usage_in_bytes": f"{GIB}\n",
        "sys/memory/memory.limit_in_bytes": "9223372036854771712\n", "sys/memory/memory.usage_in_bytes": "7\n",
    })  # fmt: skip
    assert free.cgroup == 2 * GIB


def test_top_cgroup_limit_counts_in_a_container(tmp_path: Path) -> None:
    files = {"sys/memory.max": f"{GIB}\n", "sys/memory.current": "0\n"}
    assert machine(tmp_path, "0::/../outside/step\n", files).cgroup == GIB


def test_this_machine_can_be_read() -> None:
    free = read_free_memory(Path("/dev/shm"))
    assert free.shm > 0 and free.memory > 0


@pytest.mark.parametrize(
    "free",
    [FreeMemory(GIB, 8 * GIB), FreeMemory(8 * GIB, GIB), FreeMemory(8 * GIB, 8 * GIB, cgroup=GIB)],
    ids=["shared memory", "memory", "limit"],
)
def test_any_shortage_is_refused_with_a_hint(free: FreeMemory) -> None:
    with pytest.raises(NotEnoughMemory) as refused:
        check_free_memory(2 * GIB, free, slots=2, ranks=4)
    assert "need 2.0 GiB more (2 slots for each of 4 ranks on this node)" in refused.value.what
    assert "1.0 GiB" in refused.value.what and "/dev/shm" in refused.value.hint and "disk only" in refused.value.hint


def test_memory_is_reserved_for_training() -> None:
    check_free_memory(GIB, FreeMemory(GIB, GIB + RESERVE), slots=2)
    with pytest.raises(NotEnoughMemory):
        check_free_memory(GIB, FreeMemory(GIB, GIB + RESERVE - 1), slots=2)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs in its own mount namespace")
def test_full_folder_is_an_error_at_creation_and_leaves_nothing(tmp_path: Path) -> None:
    def fill() -> None:
        mount_small(tmp_path)
        with pytest.raises(NotEnoughMemory, match="has no room for"):
            create(tmp_path / "s", 16 << 20)
        assert os.listdir(tmp_path) == []
        slots = Slots("a", 0, 1, folder=tmp_path, read_free_memory=lambda folder: FreeMemory(GIB, GIB))
        with pytest.raises(NotEnoughMemory, match="has no room for"):
            slots.prepare(filled(1, elements=200_000))
        assert os.listdir(tmp_path) == []
        with pytest.raises(NotEnoughMemory, match="8 MiB are free"):
            Slots("b", 0, 1, folder=tmp_path).prepare(filled(1, elements=1_000_000))

    in_child(fill)


def mount_small(folder: Path) -> None:
    assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", str(folder)], check=True)


def test_memory_use_is_described() -> None:
    assert describe_use(3 << 30, slots=3, ranks=1) == "3 snapshots take 3.0 GiB of memory"
    each = "3 snapshots for each of 8 ranks on this node take 24 MiB of memory"
    assert describe_use(24 << 20, slots=3, ranks=8) == each
