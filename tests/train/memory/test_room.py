"""What is free, and what is said when it is not enough."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.errors import NoRoom
from dalsegno.train.memory.room import RESERVE, FreeMemory, check_room, read_room, stated
from dalsegno.train.memory.slots import Slots, create
from tests.train.memory.processes import in_child
from tests.train.memory.states import filled

GIB = 1 << 30
CLONE_NEWNS = 0x20000
MEMINFO = "MemTotal:       24000000 kB\nMemAvailable:    8388608 kB\n"


def machine(tmp_path: Path, cgroup: str, files: dict[str, str]) -> FreeMemory:
    """A room as it is read on a machine with these files."""
    contents = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, **files}
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return read_room(tmp_path, tmp_path / "proc", tmp_path / "sys")


def test_without_a_limit_the_machines_memory_counts(tmp_path: Path) -> None:
    room = machine(tmp_path, "", {})
    assert (room.memory, room.cgroup) == (8 * GIB, None)


def test_the_tightest_limit_above_the_process_counts_version_2(tmp_path: Path) -> None:
    room = machine(tmp_path, "0::/job/step\n", {
        "sys/job/memory.max": f"{4 * GIB}\n", "sys/job/memory.current": f"{3 * GIB}\n",
        "sys/job/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        "sys/job/step/memory.max": "max\n", "sys/job/step/memory.current": "5\n",
    })  # fmt: skip
    assert room.cgroup == 2 * GIB


def test_the_tightest_limit_above_the_process_counts_version_1(tmp_path: Path) -> None:
    room = machine(tmp_path, "4:cpu,memory:/slurm/job\n1:cpuset:/\n", {
        "sys/memory/slurm/job/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/memory/slurm/job/memory.usage_in_bytes": f"{GIB}\n",
        "sys/memory/memory.limit_in_bytes": "9223372036854771712\n", "sys/memory/memory.usage_in_bytes": "7\n",
    })  # fmt: skip
    assert room.cgroup == 2 * GIB


def test_in_a_container_whose_path_starts_elsewhere_its_own_limit_counts(tmp_path: Path) -> None:
    files = {"sys/memory.max": f"{GIB}\n", "sys/memory.current": "0\n"}
    assert machine(tmp_path, "0::/../outside/step\n", files).cgroup == GIB


def test_this_machine_can_be_read() -> None:
    room = read_room(Path("/dev/shm"))
    assert room.shm > 0 and room.memory > 0


@pytest.mark.parametrize(
    "room",
    [FreeMemory(GIB, 8 * GIB), FreeMemory(8 * GIB, GIB), FreeMemory(8 * GIB, 8 * GIB, cgroup=GIB)],
    ids=["shared memory", "memory", "limit"],
)
def test_whatever_is_too_little_is_a_refusal_that_says_what_to_do(room: FreeMemory) -> None:
    with pytest.raises(NoRoom) as refused:
        check_room(2 * GIB, room, slots=2, ranks=4)
    assert "need 2.0 GiB more (2 slots for each of 4 ranks here)" in refused.value.what
    assert "1.0 GiB" in refused.value.what and "/dev/shm" in refused.value.hint and "disk only" in refused.value.hint


def test_some_memory_is_left_to_the_training() -> None:
    check_room(GIB, FreeMemory(GIB, GIB + RESERVE), slots=2)
    with pytest.raises(NoRoom):
        check_room(GIB, FreeMemory(GIB, GIB + RESERVE - 1), slots=2)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs in a mount namespace of its own")
def test_a_full_folder_is_an_error_at_creation_and_leaves_nothing(tmp_path: Path) -> None:
    def try_it() -> None:
        mount_small(tmp_path)
        with pytest.raises(NoRoom, match="is full"):
            create(tmp_path / "s", 16 << 20)
        assert os.listdir(tmp_path) == []
        slots = Slots("a", 0, 1, folder=tmp_path, read_room=lambda folder: FreeMemory(GIB, GIB))
        with pytest.raises(NoRoom, match="is full"):
            slots.prepare(filled(1, elements=200_000))
        assert os.listdir(tmp_path) == []
        with pytest.raises(NoRoom, match="8 MiB are free"):
            Slots("b", 0, 1, folder=tmp_path).prepare(filled(1, elements=1_000_000))

    in_child(try_it)


def mount_small(folder: Path) -> None:
    assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", str(folder)], check=True)


def test_what_snapshots_take_is_said_in_plain_figures() -> None:
    assert stated(3 << 30, slots=3, ranks=1) == "3 snapshots take 3.0 GiB"
    assert stated(24 << 20, slots=3, ranks=8) == "3 snapshots of each of 8 ranks here take 24 MiB"
