"""Tests of scratch folders of jobs, on a real file system, as root: ownership, links, mounts, flags, reboots."""

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.programs import launcher
from dalsegno.slurm.layout import Programs
from dalsegno.spec.facts import Cluster, Node, Slurm, Storage
from dalsegno.storage.scratch import EPILOG, PROLOG, TASK_PROLOG, job_scripts, without_programs
from dalsegno.system.job_scratch import ScratchJob, _within, create, empty_trash, job_here, retire
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="prolog and epilog run as root")
JOB = ScratchJob(17, 20001, 20002)


@pytest.fixture
def base() -> Iterator[Path]:
    """Return a base whose parent folders belong to root; pytest's own are below /tmp, which has the sticky bit."""
    folder = Path("/var/tmp") / f"ds-scratch-{os.getpid()}"
    folder.mkdir(0o755)
    yield folder
    if shutil.which("chattr"):
        subprocess.run(["chattr", "-R", "-i", "-a", str(folder)], capture_output=True, check=False)
    shutil.rmtree(folder)


def trash(base: Path) -> list[str]:
    return sorted(os.listdir(base / ".dalsegno/trash"))


def test_folder_belongs_to_the_user_of_the_job_alone(base: Path):
    create(base, JOB, "boot")
    about = (base / "job-17").stat()
    assert (about.st_uid, about.st_gid, stat.S_IMODE(about.st_mode)) == (20001, 20002, 0o700)
    assert stat.S_IMODE((base / ".dalsegno").stat().st_mode) == 0o700


def test_prolog_that_runs_twice_keeps_the_files(base: Path):
    create(base, JOB, "boot")
    (base / "job-17/kept").touch()
    create(base, JOB, "boot")
    assert (base / "job-17/kept").exists()


def test_folder_of_another_user_under_the_same_number_is_retired(base: Path):
    create(base, ScratchJob(17, 20005, 20005), "boot")
    (base / "job-17/secret").touch()
    create(base, JOB, "boot")
    assert (base / "job-17").stat().st_uid == 20001
    assert os.listdir(base / "job-17") == []


def test_finished_job_leaves_nothing(base: Path):
    create(base, JOB, "boot")
    (base / "job-17/a/b").mkdir(parents=True)
    (base / "job-17/a/b/c").write_text("x")
    retire(base, JOB)
    assert not (base / "job-17").exists()
    empty_trash(base)
    assert trash(base) == []


def test_removing_a_missing_folder_is_no_error(base: Path):
    retire(base, JOB)
    retire(base, JOB)


def test_reboot_retires_the_folders_of_all_jobs_and_nothing_else(base: Path):
    create(base, JOB, "first boot")
    (base / "data").mkdir()
    (base / "job-notes").mkdir()
    create(base, ScratchJob(18, 20001, 20001), "second boot")
    assert sorted(os.listdir(base)) == [".dalsegno", "data", "job-18", "job-notes"]


def test_jobs_that_start_together_after_a_boot_all_get_their_folders(base: Path):
    create(base, JOB, "first boot")
    for number in range(1000, 1500):  # all these folders have to be retired
        (base / f"job-{number}").mkdir()
    jobs = [ScratchJob(number, 20001, 20001) for number in range(100, 140)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda job: create(base, job, "second boot"), jobs))
    assert sorted(path.name for path in base.glob("job-*")) == sorted(job.folder for job in jobs)


def test_flags_of_a_file_with_another_link_are_kept(base: Path):
    create(base, JOB, "boot")
    (base / "system").touch()
    os.link(base / "system", base / "job-17/link")
    if (
        not shutil.which("chattr")
        or subprocess.run(["chattr", "+i", str(base / "system")], capture_output=True, check=False).returncode
    ):
        pytest.skip("this file system has no immutable files")
    retire(base, JOB)
    empty_trash(base)
    with pytest.raises(PermissionError):
        (base / "system").write_text("x")


def test_links_are_removed_but_not_followed(base: Path, tmp_path: Path):
    (tmp_path / "precious").write_text("x")
    create(base, JOB, "boot")
    (base / "job-17/file").symlink_to(tmp_path / "precious")
    (base / "job-17/folder").symlink_to(tmp_path)
    retire(base, JOB)
    empty_trash(base)
    assert trash(base) == [] and (tmp_path / "precious").read_text() == "x"


@pytest.mark.parametrize("mount", [["--bind"], ["-t", "tmpfs"]])
def test_mounts_inside_are_not_entered(base: Path, tmp_path: Path, mount: list[str]):
    (tmp_path / "precious").write_text("x")
    create(base, JOB, "boot")
    inside = base / "job-17/mounted"
    inside.mkdir()
    subprocess.run(["mount", *mount, str(tmp_path), str(inside)], check=True)
    try:
        (inside / "precious").write_text("x")
        retire(base, JOB)
        empty_trash(base)
        left = base / ".dalsegno/trash" / trash(base)[0] / "mounted"
        assert (left / "precious").read_text() == "x"
    finally:
        found = [path for path in (inside, *base.glob(".dalsegno/trash/*/mounted")) if path.exists()]
        subprocess.run(["umount", str(found[0])], check=True)
    empty_trash(base)
    assert trash(base) == []


def test_immutable_and_append_only_files_are_removed(base: Path):
    create(base, JOB, "boot")
    inside = base / "job-17/sub"
    inside.mkdir()
    (inside / "file").touch()
    if (
        not shutil.which("chattr")
        or subprocess.run(["chattr", "+i", str(inside / "file")], capture_output=True, check=False).returncode
    ):
        pytest.skip("this file system has no immutable files")
    subprocess.run(["chattr", "+a", str(inside)], check=True)
    subprocess.run(["chattr", "+i", str(base / "job-17")], check=True)
    retire(base, JOB)
    empty_trash(base)
    assert not (base / "job-17").exists() and trash(base) == []


def test_tree_deeper_than_paths_can_be_is_removed(base: Path):
    create(base, JOB, "boot")
    at = os.open(base / "job-17", os.O_RDONLY)
    for _ in range(500):
        os.mkdir("deep-folder", dir_fd=at)
        below = os.open("deep-folder", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    retire(base, JOB)
    empty_trash(base)
    assert trash(base) == []


def test_base_that_users_can_change_is_refused(base: Path):
    base.chmod(0o1777)
    with pytest.raises(PermissionError):
        create(base, JOB, "boot")


def test_base_behind_a_link_is_refused(base: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(base)
    with pytest.raises(PermissionError):
        create(tmp_path / "link", JOB, "boot")


def test_disk_that_hangs_is_abandoned():
    began = time.monotonic()
    assert _within(0.2, Path("/scratch"), lambda: time.sleep(60)) is False
    assert time.monotonic() - began < 10


def test_group_of_the_user_is_used_if_slurm_names_none():
    assert job_here({"SLURM_JOB_ID": "5", "SLURM_JOB_UID": "0"}) == ScratchJob(5, 0, 0)
    with pytest.raises(ValueError, match="SLURM_JOB_UID is not set"):
        job_here({"SLURM_JOB_ID": "5", "SLURM_JOB_UID": "root"})


# The scripts


def lab(base: Path | str, *, required: bool = False, **extra: str) -> Cluster:
    scratch = Storage("scratch", str(base), type="scratch", required=required)
    return Cluster("lab", "local", (Node("n1", 1, 1),), (), slurm=Slurm(extra=extra), storage=(scratch,))


ENV = {"SLURM_JOB_ID": "17", "SLURM_JOB_UID": "20001", "SLURM_JOB_GID": "20001", "PATH": "/usr/bin:/bin"}


def run(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", script], env={**ENV, **env}, capture_output=True, text=True, check=False)


def test_prolog_and_epilog_create_and_remove_the_folder(base: Path):
    scripts = job_scripts(lab(base), launcher())
    assert run(scripts[PROLOG]).returncode == 0
    assert (base / "job-17").stat().st_uid == 20001
    (base / "job-17/file").touch()
    assert run(scripts[EPILOG]).returncode == 0
    assert not (base / "job-17").exists()
    eventually(lambda: trash(base) == [])


@pytest.mark.parametrize("required", [False, True])
def test_missing_base_fails_the_prolog_only_if_scratch_is_required(required: bool):
    scripts = job_scripts(lab("/nowhere/scratch", required=required), launcher())
    done = run(scripts[PROLOG])
    assert done.returncode == (1 if required else 0)
    assert "/nowhere" in done.stderr
    assert run(scripts[EPILOG]).returncode == 0


def test_broken_python_does_not_drain_the_node():
    scripts = job_scripts(lab("/scratch"), ("/nowhere/python", "programs.py"))
    assert (run(scripts[PROLOG]).returncode, run(scripts[EPILOG]).returncode) == (0, 0)


def test_programs_of_the_cluster_file_are_called_and_keep_their_exit_codes(base: Path, tmp_path: Path):
    names = {}
    for name, code in (("Prolog", 7), ("epilog", 8), ("TaskProlog", 0)):
        names[name] = tmp_path / name
        names[name].write_text(f"#!/bin/sh\necho export {name}=1\nexit {code}\n")
        names[name].chmod(0o755)
    cluster = lab(base, **{name: str(path) for name, path in names.items()}, MaxArraySize="5")
    scripts = job_scripts(cluster, launcher())
    assert [run(scripts[name]).returncode for name in (PROLOG, EPILOG, TASK_PROLOG)] == [7, 8, 0]
    assert run(scripts[TASK_PROLOG]).stdout == "export TaskProlog=1\n"
    assert not (base / "job-17").exists(), "a job that does not start needs no folder"
    assert without_programs(cluster.slurm.extra) == {"MaxArraySize": "5"}


def test_pattern_of_the_cluster_file_calls_all_programs_that_match(tmp_path: Path):
    folder = tmp_path / "prolog d"
    folder.mkdir()
    for name, code in (("a", 0), ("b", 9), ("c", 0)):
        (folder / name).write_text(f"#!/bin/sh\necho {name}\nexit {code}\n")
        (folder / name).chmod(0o755)
    (folder / "README").touch()
    cluster = replace(lab("/scratch"), storage=())
    cluster = replace(cluster, slurm=replace(cluster.slurm, extra={"Prolog": f"{folder}/*"}))
    script = job_scripts(cluster, launcher(), check="echo checked\n")[PROLOG]
    assert (run(script).stdout, run(script).returncode) == ("a\nb\n", 9), "a failure ends the prolog"
    (folder / "b").unlink()
    assert (run(script).stdout, run(script).returncode) == ("a\nc\nchecked\n", 0)


def test_cluster_without_scratch_has_no_scripts():
    assert job_scripts(Cluster("lab", "local", (), ()), launcher()) == {}
    assert Programs().task_prolog == ""


@pytest.mark.parametrize(
    ("given", "then"),
    [("", True), ("/tmp", True), ("/var/tmp", True), ("BASE/job-3", True), ("/data/my-tmp", False)],
)
def test_task_prolog_sets_tmpdir_unless_the_user_chose_one(base: Path, given: str, then: bool):
    create(base, ScratchJob(17, os.geteuid(), 0), "boot")
    script = job_scripts(lab(base), launcher())[TASK_PROLOG]
    lines = run(script, **({"TMPDIR": given.replace("BASE", str(base))} if given else {})).stdout.splitlines()
    folder = base / "job-17"
    assert lines[:2] == [f"export DALSEGNO_SCRATCH={folder}", f"export SLURM_TMPDIR={folder}"]
    assert lines[2:] == ([f"export TMPDIR={folder}"] if then else [])


def test_task_prolog_is_silent_without_a_folder_of_the_user(base: Path):
    script = job_scripts(lab(base), launcher())[TASK_PROLOG]
    assert run(script).stdout == ""
    create(base, JOB, "boot")  # this job belongs to another user
    assert run(script).stdout == ""


def test_program_needs_nothing_but_the_standard_library(base: Path):
    code = "import sys; sys.path[:0] = [sys.argv[1]]; import dalsegno.system.job_scratch; print(*sys.modules)"
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, source], capture_output=True, text=True, check=True)
    assert not {"pydantic", "yaml", "click", "rich"} & set(done.stdout.split())
