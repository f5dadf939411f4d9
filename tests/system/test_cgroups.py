"""Tests of finding cgroup hierarchies and the place of a cluster's folders."""

from pathlib import Path

import pytest

from dalsegno.system.cgroups import (
    SYSTEMD_RUNS,
    CgroupPlace,
    CgroupTree,
    cluster_folders,
    controllers_below,
    ends_with_session,
    find_cgroups,
    remove_cgroup,
    user_scope_command,
)
from dalsegno.system.guest.init import pass_controllers_on
from dalsegno.system.processes import FakeRunner

V1 = """tmpfs /sys/fs/cgroup tmpfs rw 0 0
cgroup /sys/fs/cgroup/cpu cgroup rw,relatime,cpu 0 0
cgroup /sys/fs/cgroup/freezer cgroup rw,relatime,freezer 0 0
cgroup /sys/fs/cgroup/systemd cgroup rw,relatime,xattr,name=systemd 0 0
"""
HYBRID = f"{V1}cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0\n"
V2 = "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,nodev,noexec,relatime,nsdelegate 0 0\n"
NO_FREEZER = "cgroup /sys/fs/cgroup/systemd cgroup rw,name=systemd 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"


@pytest.mark.parametrize(
    ("mounts", "systemd", "expected"),
    [
        (V1, False, CgroupTree(1, "/sys/fs/cgroup/freezer")),
        (V1, True, CgroupTree(1, "/sys/fs/cgroup/freezer", ("/sys/fs/cgroup/systemd",))),
        (HYBRID, False, CgroupTree(1, "/sys/fs/cgroup/freezer")),
        (
            HYBRID,
            True,
            CgroupTree(1, "/sys/fs/cgroup/freezer", ("/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified")),
        ),
        (V2, False, CgroupTree(2, "/sys/fs/cgroup")),
        (V2, True, CgroupTree(2, "/sys/fs/cgroup", ("/sys/fs/cgroup",))),
        (V2.replace("cgroup2 rw,", "cgroup2 ro,"), False, CgroupTree()),
        (NO_FREEZER, False, CgroupTree()),
        ("proc /proc proc rw 0 0\n", False, CgroupTree()),
        ("", True, CgroupTree()),
    ],
    ids=["v1", "v1+systemd", "hybrid", "hybrid+systemd", "v2", "v2+systemd", "v2-read-only", "no-freezer", "none", ""],
)
def test_cgroup_hierarchies_are_read_from_mounts(mounts: str, systemd: bool, expected: CgroupTree):
    assert find_cgroups(mounts, systemd=systemd) == expected


@pytest.mark.parametrize(
    ("kind", "processes", "passed_on", "expected"),
    [
        (None, "1\n2\n", "", {"cpuset", "memory"}),
        ("domain", "", "", {"cpuset", "memory"}),
        ("domain", "1\n", "", set()),
        ("domain", "0\n", "", set()),
        ("domain", "1\n", "memory pids", {"memory"}),
    ],
    ids=["machine", "container", "container-with-processes", "processes-of-outside", "passed-on-already"],
)
def test_container_root_with_processes_offers_only_enabled_controllers(
    tmp_path: Path, kind: str | None, processes: str, passed_on: str, expected: set[str]
):
    (tmp_path / "cgroup.controllers").write_text("cpuset memory\n")
    (tmp_path / "cgroup.procs").write_text(processes)
    (tmp_path / "cgroup.subtree_control").write_text(passed_on)
    if kind:
        (tmp_path / "cgroup.type").write_text(f"{kind}\n")
    assert controllers_below(tmp_path) == expected


@pytest.mark.parametrize(
    ("kind", "processes", "expected"),
    [(None, "1\n", "+pids"), ("domain", "", "+pids"), ("domain", "1\n", "")],
    ids=["machine", "container", "container-with-processes"],
)
def test_no_controller_is_enabled_in_a_container_root_with_processes(
    tmp_path: Path, kind: str | None, processes: str, expected: str
):
    """The kernel would enable threaded controllers there, and then no process could enter a child cgroup."""
    (tmp_path / "cgroup.controllers").write_text("pids\n")
    (tmp_path / "cgroup.procs").write_text(processes)
    (tmp_path / "cgroup.subtree_control").write_text("")
    if kind:
        (tmp_path / "cgroup.type").write_text(f"{kind}\n")
    pass_controllers_on(str(tmp_path))
    assert (tmp_path / "cgroup.subtree_control").read_text() == expected


def test_cgroup_v2_cluster_is_in_its_systemd_scope():
    scope = "/sys/fs/cgroup/system.slice/dalsegno-0a.scope"
    assert find_cgroups(V2, systemd=True).place("0a") == CgroupPlace(scope, "dalsegno-0a.scope", (scope,))


def test_cluster_folder_is_at_the_root_without_systemd():
    assert find_cgroups(V2, systemd=False).place("0a") == CgroupPlace("/sys/fs/cgroup/dalsegno-0a")
    assert find_cgroups(V1, systemd=False).place("0a") == CgroupPlace("/sys/fs/cgroup/freezer/dalsegno-0a")


def test_cgroup_v1_with_systemd_uses_scope_and_freezer():
    place = find_cgroups(HYBRID, systemd=True).place("0a")
    assert place.base == "/sys/fs/cgroup/freezer/dalsegno-0a"
    assert place.unit_folders == (
        "/sys/fs/cgroup/systemd/system.slice/dalsegno-0a.scope",
        "/sys/fs/cgroup/unified/system.slice/dalsegno-0a.scope",
    )


@pytest.mark.parametrize("mounts", [V1, HYBRID, V2])
@pytest.mark.parametrize("systemd", [True, False])
def test_all_cgroup_folders_of_a_cluster_are_found(tmp_path: Path, mounts: str, systemd: bool):
    place = find_cgroups(mounts.replace("/sys/fs/cgroup", str(tmp_path)), systemd=systemd).place("0a")
    made = {Path(folder) for folder in (place.base, *place.unit_folders) if folder}
    for folder in made:
        (folder / "train-1" / "init.scope").mkdir(parents=True)
    other = tmp_path / "system.slice" / "dalsegno-0b.scope"
    other.mkdir(parents=True)
    assert set(cluster_folders("0a", tmp_path)) == made
    for folder in made:
        remove_cgroup(folder)
    assert cluster_folders("0a", tmp_path) == []
    assert other.is_dir()


def test_plain_user_leaves_the_session_only_with_linger(tmp_path: Path):
    (tmp_path / "ada").touch()
    assert bool(user_scope_command("ada", tmp_path)) == SYSTEMD_RUNS.is_dir()
    assert user_scope_command("bob", tmp_path) == []


@pytest.mark.skipif(SYSTEMD_RUNS.is_dir(), reason="systemd runs here")
def test_nothing_ends_with_the_session_without_systemd():
    assert not ends_with_session(FakeRunner({}), "bob")
