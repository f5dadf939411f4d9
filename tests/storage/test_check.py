"""Tests of the check of storage from every node. Each "node" is a mount namespace of its own, with real mounts."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.inject import hanging_fs
from dalsegno.programs import launcher
from dalsegno.spec.facts import Storage
from dalsegno.storage.check import check_storage
from dalsegno.storage.probe import ProbeAnswer, ProbeOrder, ProbeRole, find_mount, is_stale, lists_export
from dalsegno.storage.verdict import StorageFault, StorageReport, judge_storage
from dalsegno.system.hanging_calls import NoAnswer, ask, slowness
from tests.storage import slow_fs
from tests.waiting import eventually

root = pytest.mark.skipif(os.geteuid() != 0, reason="to mount takes root")


def needs_root(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that mounts, and starts a Python on every node: too slow for the unit part."""
    return pytest.mark.cluster(root(test))


class Nodes:
    """Runs programs in mount namespaces. Each node has a shell command that mounts what it sees at `point`."""

    def __init__(self, folder: Path, mounts: Mapping[str, str], timeout_s: float = 20.0) -> None:
        self.point, self.shared, self.mounts, self.timeout_s = folder / "fsx", folder / "shared", mounts, timeout_s

    def __call__(self, node: str, program: str, arguments: Sequence[str]) -> str:
        script = f'set -e; {self.mounts[node].format(point=self.point, shared=self.shared)}; exec "$@"'
        argv = ["unshare", "--mount", "--uts", "sh", "-c", f"hostname {node}; {script}", "sh", *launcher()]
        try:
            return ask([*argv, program, *arguments], timeout_s=self.timeout_s).checked().stdout
        except NoAnswer as silence:
            raise DalsegnoError(str(silence), hint="") from silence

    def check(self, kind: str = "folder", *, measure: bool = False, **limits: int) -> StorageReport:
        storage = Storage("fsx", str(self.point), type=kind, **limits)  # type: ignore[arg-type]
        return check_storage([storage], list(self.mounts), "nobody", self, measure=measure)[0]


BIND = "mount --bind {shared} {point}"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder that user nobody can reach, with a shared folder and a mount point."""
    made = Path(tempfile.mkdtemp(prefix="ds-storage-", dir="/tmp"))
    made.chmod(0o755)
    for name in ("fsx", "shared"):
        (made / name).mkdir()
    (made / "shared").chmod(0o1777)
    yield made
    shutil.rmtree(made)


def faults(report: StorageReport) -> dict[StorageFault, tuple[str, ...]]:
    return {finding.fault: finding.nodes for finding in report.findings if not finding.warning}


@needs_root
def test_same_folder_on_all_nodes_passes_and_is_left_empty(folder: Path):
    report = Nodes(folder, dict.fromkeys(("a", "b", "c"), BIND)).check()
    answers = [answer for answer in report.answers.values() if answer]
    assert report.ok and len({answer.inode for answer in answers}) == 1 and all(answer.token for answer in answers)
    assert os.listdir(folder / "shared") == []


@needs_root
def test_node_without_the_mount_is_named(folder: Path):
    assert faults(Nodes(folder, {"a": BIND, "b": "true", "c": BIND}).check()) == {StorageFault.NOT_MOUNTED: ("b",)}


@needs_root
def test_read_only_mount_is_named_also_on_the_first_node(folder: Path):
    locked = f"{BIND}; mount -o remount,bind,ro {{point}}"
    report = Nodes(folder, {"a": locked, "b": BIND, "c": BIND}).check()
    assert faults(report) == {StorageFault.READ_ONLY: ("a",)}


@needs_root
@pytest.mark.parametrize("odd", ["a", "c"])
def test_node_with_another_file_system_under_the_path_is_named(folder: Path, odd: str):
    mounts = {**dict.fromkeys(("a", "b", "c"), BIND), odd: "mount -t tmpfs -o mode=1777 tmpfs {point}"}
    report = Nodes(folder, mounts).check()
    assert faults(report) == {StorageFault.OTHER_FILES: (odd,)}
    assert "tmpfs from tmpfs" in report.findings[0].text


@needs_root
def test_folder_that_the_user_may_not_write_to_is_named(folder: Path):
    (folder / "shared").chmod(0o755)
    report = Nodes(folder, {"a": BIND, "b": BIND}).check()
    assert faults(report) == {StorageFault.NOT_WRITABLE: ("a", "b")}
    assert report.findings[0].text == f"nobody cannot write to {folder}/fsx: Permission denied"


@needs_root
def test_folder_of_the_users_own_is_enough(folder: Path):
    (folder / "shared").chmod(0o755)
    (folder / "shared/nobody").mkdir(0o700)
    os.chown(folder / "shared/nobody", 65534, 65534)
    assert Nodes(folder, {"a": BIND, "b": BIND}).check().ok


@needs_root
def test_root_follows_no_link_of_its_name(folder: Path):
    """Every user may create such a link in a shared folder."""
    (folder / "victim").mkdir()
    (folder / "shared" / "root").symlink_to(folder / "victim")
    nodes = Nodes(folder, {"a": BIND})
    order = ProbeOrder(str(nodes.point), "c0ffee", ProbeRole.WRITER, "root", measure=False)
    assert ProbeAnswer.from_json(nodes("a", "storage-probe", [order.to_json()])).token
    assert os.listdir(folder / "victim") == [] and ".dalsegno-check-c0ffee" in os.listdir(folder / "shared")


@needs_root
def test_node_without_the_folder_is_named(folder: Path):
    report = Nodes(folder, {"a": BIND, "b": "mount -t tmpfs tmpfs {shared}/.."}).check()
    assert faults(report) == {StorageFault.MISSING: ("b",)}


@needs_root
def test_existing_storage_may_be_a_folder_inside_a_mount(folder: Path):
    inside = "mount --bind {shared}/.. {shared}/..; true"
    (folder / "fsx").chmod(0o1777)
    assert Nodes(folder, {"a": inside, "b": inside}).check("existing").ok
    report = Nodes(folder, {"a": inside, "b": inside, "c": "true"}).check("existing")
    assert faults(report) == {StorageFault.NOT_MOUNTED: ("c",)}


@contextmanager
def mounted(program: object, folder: Path, *arguments: str) -> Iterator[Path]:
    """Mount a FUSE file system, and unmount it at the end."""
    at = folder / "fuse"
    at.mkdir()
    argv = [sys.executable, str(program.__file__), str(at), *arguments]  # type: ignore[attr-defined]
    process = subprocess.Popen(argv)
    try:
        eventually(lambda: str(at) in Path("/proc/self/mounts").read_text())
        yield at
    finally:
        process.kill()
        process.wait()
        subprocess.run(["umount", "--lazy", str(at)], check=True)


@needs_root
def test_slow_storage_warns_and_fails_below_the_limits_of_the_cluster_file(folder: Path):
    with mounted(slow_fs, folder, "0.02", "0.05"):
        nodes = Nodes(folder, {"a": "mount --bind {shared}/../fuse {point}"})
        warned = nodes.check(measure=True)
        assert warned.ok and [each.fault for each in warned.findings] == [StorageFault.SLOW, StorageFault.SLOW]
        answer = warned.answers["a"]
        assert answer is not None and 0 < answer.mb_per_s < 50 and 0 < answer.files_per_s < 25
    storage = replace(warned.storage, min_mb_per_s=60, min_files_per_s=10)
    strict = judge_storage(storage, warned.answers, "nobody")
    assert faults(strict) == {StorageFault.SLOW: ("a",)}
    assert "60 (the cluster file)" in strict.findings[0].text


@needs_root
def test_storage_that_hangs_is_reported_in_time(folder: Path):
    with mounted(hanging_fs, folder):
        began = time.monotonic()
        hanging = "mount --bind {shared}/../fuse {point}"
        report = Nodes(folder, {"a": BIND, "b": hanging}, timeout_s=3 * slowness()).check()
        assert faults(report) == {StorageFault.SILENT: ("b",)}
        assert time.monotonic() - began < 15 * slowness()


# Pure parts

MOUNTINFO = """\
20 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 20 0:40 / /fsx rw,noatime - lustre 10.0.0.1@tcp:/fsx rw,flock
31 20 0:41 / /fsx2 ro - nfs4 filer:/two rw
32 20 0:42 / /with\\040blank rw - tmpfs tmpfs rw
33 30 0:43 / /fsx rw - nfs4 filer:/over ro,vers=4.2
"""


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/fsx", ("/fsx", "nfs4", "filer:/over", True)),
        ("/fsx/inside", ("/fsx", "nfs4", "filer:/over", True)),
        ("/fsx2", ("/fsx2", "nfs4", "filer:/two", True)),
        ("/fsx3", ("/", "ext4", "/dev/sda1", False)),
        ("/with blank", ("/with blank", "tmpfs", "tmpfs", False)),
    ],
)
def test_mount_of_a_path_is_found(path: str, found: tuple[str, str, str, bool]):
    assert find_mount(MOUNTINFO, path) == found


FINE = ProbeAnswer("nfs4", "filer:/x", "/fsx", True, free_bytes=1 << 40, inode=7, token=True)
FSX = Storage("fsx", "/fsx", type="nfs", source="filer:/x")


def test_other_inode_is_another_file_system_even_with_the_same_content():
    report = judge_storage(FSX, {"a": FINE, "b": FINE, "c": replace(FINE, inode=8)}, "ann")
    assert faults(report) == {StorageFault.OTHER_FILES: ("c",)}


def test_each_node_is_reported_with_one_fault():
    answers = {"a": FINE, "b": None, "c": replace(FINE, read_only=True, error="Read-only file system", token=False)}
    report = judge_storage(FSX, answers, "ann")
    assert faults(report) == {StorageFault.SILENT: ("b",), StorageFault.READ_ONLY: ("c",)}


@pytest.mark.parametrize(
    ("folder", "there"), [("/export/home", True), ("/export/home/ann", True), ("/export/home2", False), ("/x", False)]
)
def test_exports_of_a_server_are_read(folder: str, there: bool):
    assert lists_export("/export/home 192.0.2.0/24\n/export/data (everyone)\n", folder) is there


def test_folder_that_the_server_does_not_export_is_named():
    absent = ProbeAnswer("ext4", "/dev/sda1", "/", not_exported=True, free_bytes=1 << 40)
    report = judge_storage(FSX, {"a": FINE, "b": absent}, "ann")
    assert faults(report) == {StorageFault.NOT_EXPORTED: ("b",)}
    assert report.findings[0].text == "nothing is mounted at /fsx: server filer does not export /x"


def test_stale_mount_of_existing_storage_names_its_server():
    lost = ProbeAnswer("nfs4", "nas:/export/team", "/team", mounted=True, not_exported=True, error="Stale file handle")
    report = judge_storage(Storage("team", "/team", type="existing"), {"a": FINE, "b": lost}, "ann")
    assert faults(report) == {StorageFault.NOT_EXPORTED: ("b",)}
    assert report.findings[0].text == "the mount at /team is stale: server nas no longer exports /export/team"
    assert "add /export/team to /etc/exports of nas" in report.findings[0].hint
    listed = judge_storage(Storage("team", "/team", type="existing"), {"b": replace(lost, not_exported=False)}, "ann")
    assert faults(listed)[StorageFault.NOT_WRITABLE] == ("b",)


def test_server_is_asked_about_a_mounted_folder_only_if_its_handle_is_stale():
    assert is_stale("nfs4", OSError(errno.ESTALE, "")) and is_stale("nfs", OSError(errno.ESTALE, ""))
    assert not is_stale("nfs4", OSError(errno.EACCES, "")) and not is_stale("ext4", OSError(errno.ESTALE, ""))


def test_nearly_full_storage_is_a_warning():
    report = judge_storage(FSX, {"a": replace(FINE, free_bytes=10 << 20)}, "ann")
    assert report.ok and [each.fault for each in report.findings] == [StorageFault.FULL]


@pytest.mark.parametrize(
    "text", ["", "null", "[]", '{"inode": "x"}', '{"inode": Infinity}', "Traceback", "[" * 100_000]
)
def test_malformed_answers_are_refused(text: str):
    with pytest.raises(ValueError):
        ProbeAnswer.from_json(text)
