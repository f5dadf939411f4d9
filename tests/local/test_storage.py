"""Tests of the storage of a local cluster: bind mounts of hosts, homes, mount points, and what `plan` says."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.errors import TargetError
from dalsegno.spec.facts import Cluster, Containers, Slurm, Storage, User
from dalsegno.system.hosts import PACKAGES
from dalsegno.targets.base import Removal
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.machine_room import replace as replace_machine
from dalsegno.targets.local.storage import (
    check_storage,
    foreign_homes,
    lost_homes,
    lost_storage,
    make_homes,
    make_mount_points,
    make_storage,
    remove_mount_points,
    storage_sentences,
)
from dalsegno.users.accounts import PosixUser
from tests.local.sites import nodes_of
from tests.local.test_desired import FOLDER, ROOT, USER, cluster, plan, put, running, want

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root")
FSX, HOME = Storage("fsx", "/fsx"), Storage("home", "/home", source="/tank/home", home=True)
SCRATCH = Storage("scratch", "/scratch", type="scratch")


def with_storage(*storage: Storage, **more: object) -> Cluster:
    return cluster(2, storage=storage, **more)


def person(name: str) -> User:
    return User(name, (), "")


def binds(there: Cluster, host: str) -> dict[str, str]:
    return {target: source for source, target in want(there).hosts[host].binds}


@pytest.mark.parametrize("host", ["head", "login-1", "train-1", "train-2"])
def test_shared_storage_is_mounted_on_every_host(host: str):
    found = binds(with_storage(FSX, HOME, logins=("login-1",)), host)
    assert (found["/fsx"], found["/home"]) == ("/state/clusters/demo/storage/fsx", "/tank/home")


def test_scratch_is_a_disk_of_each_compute_node():
    there = with_storage(SCRATCH)
    assert binds(there, "train-2")["/scratch"] == "/state/clusters/demo/hosts/train-2/scratch"
    assert "/scratch" not in binds(there, "head")


def test_folder_at_its_own_path_and_existing_storage_are_not_mounted_again():
    there = with_storage(Storage("a", "/a", source="/a"), Storage("b", "/b", type="existing"))
    assert not {"/a", "/b"} & binds(there, "train-1").keys()


def test_loopback_nodes_mount_nothing_and_plan_says_so():
    there = with_storage(FSX, SCRATCH, Storage("data", "/data", source="/data"))
    assert all(host.binds == () for host in want(there, USER).hosts.values())
    assert storage_sentences(there, FOLDER, put(there, USER)) == [
        "storage fsx is not mounted at /fsx, which needs virtual hosts: use /state/clusters/demo/storage/fsx",
        "no scratch folders at /scratch: nodes on loopback ports have no disk of their own",
    ]
    assert "Prolog" not in want(there, USER).files["etc/slurm.conf"].text


def test_plan_says_where_storage_is_and_what_it_hides():
    there = with_storage(FSX, Storage("bin", "/usr/share", source="/tank"), SCRATCH)
    assert storage_sentences(there, FOLDER, put(there)) == [
        "mounts /state/clusters/demo/storage/fsx at /fsx on all hosts (storage fsx); `down` removes it",
        "mounts /tank at /usr/share on all hosts (storage bin), which hides this machine's own /usr/share inside the "
        "hosts",
        "gives each job a scratch folder below /scratch on each of its nodes",
    ]


def test_homes_are_on_the_storage_for_them():
    there = with_storage(HOME, users=(person("ann"),))
    assert ":/home/ann:" in want(there).files["etc/passwd"].text
    assert f":{FOLDER.homes}/ann:" in want(replace(there, storage=(FSX,))).files["etc/passwd"].text


def test_scratch_sets_slurms_programs_and_calls_those_of_the_cluster_file():
    there = with_storage(SCRATCH, slurm=Slurm(extra={"prolog": "/etc/slurm/health-prolog"}))
    files = want(there).files
    conf = files["etc/slurm.conf"].text
    assert "\nProlog=/state/clusters/demo/bin/slurm-prolog\n" in conf and "health-prolog" not in conf
    assert "\nTaskProlog=/state/clusters/demo/bin/slurm-task-prolog\n" in conf
    assert "/etc/slurm/health-prolog || exit $?" in files["bin/slurm-prolog"].text
    assert "--boot-id /state/clusters/demo/hosts/%n/boot-id" in files["bin/slurm-prolog"].text
    assert files["bin/slurm-epilog"].mode == 0o755


def test_containers_see_the_scratch_disk_and_the_task_prolog():
    there = with_storage(SCRATCH, containers=Containers(enabled=True))
    line = want(there).files["etc/plugstack.conf"].text.splitlines()[-1]
    assert line.endswith(" show=/scratch show=/state/clusters/demo/bin/slurm-task-prolog")


def test_cluster_file_keeps_its_prolog_without_scratch():
    conf = want(with_storage(FSX, slurm=Slurm(extra={"Prolog": "/etc/slurm/p"}))).files["etc/slurm.conf"].text
    assert "\nProlog=/etc/slurm/p\n" in conf


# Changes of a running cluster


def binds_of(there: Cluster) -> dict[str, tuple[tuple[str, str], ...]]:
    return {name: host.binds for name, host in want(there).hosts.items()}


def test_new_storage_is_mounted_on_running_hosts_without_a_restart():
    before = with_storage()
    made = plan(with_storage(FSX), replace(running(before), binds=binds_of(before)))
    assert set(made.remount) == {"head", "train-1", "train-2"}
    assert (made.boot, made.restart) == ((), ())
    assert "mounts storage fsx at /fsx" in made.sentences()


def test_removed_storage_is_unmounted_and_kept_until_down():
    before = with_storage(FSX, HOME)
    made = plan(with_storage(HOME), replace(running(before), binds=binds_of(before)))
    assert made.sentences()[:2] == [
        "unmounts /fsx (storage fsx); jobs that use it fail",
        "keeps the files of storage fsx in the state folder until `down`",
    ]


def test_unchanged_storage_changes_nothing():
    there = with_storage(FSX, HOME, SCRATCH)
    assert plan(there, replace(running(there), binds=binds_of(there))).empty


# Checks before anything is changed


def check(*storage: Storage, mountinfo: str = "", folder: Folder = FOLDER) -> None:
    there = with_storage(*storage)
    check_storage(there, folder, put(there), mountinfo)


def test_source_that_does_not_exist_is_refused():
    with pytest.raises(TargetError, match="the folder /tank/home of storage `home` does not exist"):
        check(HOME)


@needs_root
def test_homes_are_not_created_in_a_folder_that_a_user_can_replace(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("SUDO_UID", raising=False)
    (tmp_path / "theirs/homes").mkdir(parents=True)
    home = replace(HOME, source=str(tmp_path / "theirs/homes"))
    check(home)
    os.chown(tmp_path / "theirs", 54321, 54321)
    with pytest.raises(TargetError, match=r"users can replace .*theirs, where root would create the home folders"):
        check(home)


def test_existing_storage_must_be_mounted_on_this_machine():
    here = Storage("a", "/usr", type="existing")
    with pytest.raises(TargetError, match="nothing is mounted at /usr on this machine"):
        check(here, mountinfo="1 0 8:1 / / rw - ext4 /dev/sda1 rw\n")
    check(here, mountinfo="1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / /usr rw - ext4 /dev/b rw\n")


@pytest.mark.parametrize(
    ("mount", "why"),
    [
        (str(Path(PACKAGES).parent), "would hide"),
        ("/state", "would hide /state/clusters/demo"),
        ("/state/clusters/demo/x", "inside the cluster's state folder"),
        ("/dev/null", "is not a folder"),
    ],
)
def test_mount_point_that_would_break_the_hosts_is_refused(mount: str, why: str):
    with pytest.raises(TargetError, match=why):
        check(Storage("a", mount))


def test_source_below_a_mount_point_is_refused():
    inside = Storage("a", "/usr/share", source="/usr/share/doc")
    with pytest.raises(TargetError, match="`a` mounted at /usr/share would hide /usr/share/doc"):
        check(inside)
    with pytest.raises(TargetError, match="`b` mounted at /usr/share would hide /usr/share/doc"):
        check(Storage("c", "/c", source="/usr/share/doc"), Storage("b", "/usr/share", source="/usr/lib"))


@needs_root
def test_mount_point_that_users_can_replace_is_refused(tmp_path: Path):
    open_to_all = Path(tempfile.mkdtemp(dir="/var/tmp"))
    open_to_all.chmod(0o777)
    try:
        with pytest.raises(TargetError, match="users can replace"):
            check(Storage("a", f"{open_to_all}/mount"))
    finally:
        open_to_all.rmdir()


# Folders on this machine


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "clusters/demo")
    made.root.mkdir(parents=True)
    return made


@pytest.fixture
def top() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="ds-mount-", dir="/var/tmp"))
    yield made
    shutil.rmtree(made)


@needs_root
def test_mount_points_that_up_created_are_removed_and_others_kept(folder: Folder, top: Path):
    (top / "there").mkdir()
    make_mount_points(folder, [f"{top}/a/b", f"{top}/there"])
    assert (top / "a/b").is_dir() and json.loads(folder.mount_points.read_text()) == [f"{top}/a", f"{top}/a/b"]
    make_mount_points(folder, [f"{top}/a/b", f"{top}/c"])
    remove_mount_points(folder)
    assert sorted(os.listdir(top)) == ["there"]


@needs_root
def test_mount_point_in_use_by_another_cluster_is_kept(folder: Folder, top: Path):
    make_mount_points(folder, [f"{top}/a"])
    script = f"mount -t tmpfs tmpfs {top}/a && echo ready && exec sleep 60"
    other = subprocess.Popen(["unshare", "--mount", "sh", "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        remove_mount_points(folder)
        assert (top / "a").is_dir()
    finally:
        other.kill()
        other.wait()
    remove_mount_points(folder)
    assert not (top / "a").exists()


@needs_root
def test_last_of_two_clusters_removes_the_mount_point(folder: Folder, top: Path):
    other = Folder(folder.root.parent / "other")
    other.root.mkdir()
    make_mount_points(folder, [f"{top}/a"])
    make_mount_points(other, [f"{top}/a"])
    shutil.rmtree(folder.root)  # the `down` of this cluster kept the mount point, because the other cluster used it
    remove_mount_points(other)
    assert not (top / "a").exists()


@needs_root
def test_mount_point_with_files_is_kept(folder: Folder, top: Path):
    make_mount_points(folder, [f"{top}/a"])
    (top / "a/file").touch()
    remove_mount_points(folder)
    assert (top / "a/file").exists()


@needs_root
def test_homes_get_their_owner_and_links_are_not_followed(folder: Folder, top: Path, tmp_path: Path):
    there = with_storage(replace(HOME, source=str(top)), users=(person("ann"), person("bob"), person("eve")))
    placed = put(there)
    (top / "bob").symlink_to(tmp_path)
    (top / "eve").mkdir()
    make_homes(top, [PosixUser(each.name, *[placed.uids[each.name]] * 2) for each in there.users])
    assert (top / "ann").stat().st_uid == placed.uids["ann"]
    assert tmp_path.stat().st_uid == 0, "the link of another user was not followed"
    sentences = foreign_homes(there, folder, placed, there.users)
    assert sentences == [
        f"the home folder of bob exists already and is not a folder: rename {top}/bob",
        f"the home folder of eve exists already and belongs to uid 0, not {placed.uids['eve']}: set `uid: 0` if it is "
        "the same person",
    ]


@needs_root
def test_shared_folder_is_open_to_all_users_and_homes_are_not(folder: Folder):
    there = with_storage(replace(FSX, mount=str(folder.root)), Storage("home", "/home", home=True))
    make_storage(there, folder, put(there, USER))
    modes = [(folder.storage / name).stat().st_mode & 0o7777 for name in ("fsx", "home")]
    assert modes == [0o1777, 0o755]


def test_down_names_storage_and_homes_in_the_state_folder(folder: Folder):
    own = with_storage(FSX, Storage("home", "/home", home=True))
    (folder.storage / "home/ann/run").mkdir(parents=True)
    (folder.storage / "fsx/data").mkdir(parents=True)
    assert (lost_homes(own, folder), lost_storage(own, folder)) == (("ann",), ("fsx",))
    assert "deletes the files of storage fsx" in Removal(storage=("fsx",)).sentences(())
    outside = with_storage(HOME, Storage("fsx", "/fsx", source="/tank"))
    assert (lost_homes(outside, folder), lost_storage(outside, folder)) == ((), ())


def test_replaced_machine_has_an_empty_scratch_disk(tmp_path: Path):
    nodes = nodes_of(tmp_path)
    left = nodes.folder.scratch("train-1") / "job-1"
    left.mkdir(parents=True)
    with pytest.raises(TargetError):  # nothing runs here, so the new machine does not boot
        replace_machine(nodes, "train-1")
    assert not left.exists() and nodes.folder.scratch("train-1").is_dir()


def test_machine_facts_of_the_tests_have_virtual_hosts():
    assert put(with_storage(), ROOT).hosts == "virtual"
