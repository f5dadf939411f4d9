"""Attacks on `down`, which removes folders of users as root: it neither touches nor waits for anything outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.cli.cluster.down import end_in_order, runs_on, write_ends
from dalsegno.cluster import ClusterPlace
from dalsegno.recovery.runs.run_records import RunRecord, RunRecords
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.status import RunPhase, RunStatus, write_status
from dalsegno.system.files import make_folder, remove_tree
from dalsegno.targets.local.folder import Folder
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be tricked, and only root can become a user")
SOURCE = Path(__file__).parents[2] / "src"
EVE = 65534
AS_EVE = ["setpriv", f"--reuid={EVE}", f"--regid={EVE}", "--clear-groups"]

# Removes eve's home, which contains a folder without permissions. She replaces that folder with a link to another
# user's folder at the worst moment, just before its permissions are changed.
SWAP = """
import os, sys
from pathlib import Path
from dalsegno.system.files import remove_tree

home, victim, swapped = Path(sys.argv[1]), sys.argv[2], []

def at_the_worst_moment(event, arguments):
    if event == "os.rmdir" and not swapped:
        raise OSError("busy")
    if event in ("os.chmod", "os.chown") and not swapped:
        swapped.append(event)
        os.rename(home / "closed", home / "aside")
        os.symlink(victim, home / "closed")

sys.addaudithook(at_the_worst_moment)
try:
    remove_tree(home)
except OSError:
    pass
"""
REMOVE = """
import sys
from pathlib import Path
from dalsegno.system.files import remove_tree
remove_tree(Path(sys.argv[1]))
"""


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of root with mode 0500, and a file in it."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "file").write_text("kept")
    folder.chmod(0o500)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """Eve's home in a cluster's folder."""
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(parent.stat().st_mode | 0o055)
    folder = tmp_path / "cluster/home/eve"
    make_folder(folder)
    os.chown(folder, EVE, EVE)
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)  # leftovers may be too deep for pytest


def test_link_swapped_in_during_removal_is_not_followed(home: Path, victim: Path) -> None:
    (home / "closed").mkdir(mode=0)
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", SWAP, str(home), str(victim)], env=env, check=True)
    assert (victim.stat().st_mode & 0o777, (victim / "file").read_text()) == (0o500, "kept")


def test_folders_nested_deeper_than_a_path_can_name_are_removed(home: Path) -> None:
    deep = (
        "import os, sys\nos.chdir(sys.argv[1])\nfor _ in range(3000):\n    os.mkdir('d' * 50)\n    os.chdir('d' * 50)"
    )
    subprocess.run([*AS_EVE, sys.executable, "-c", deep, str(home)], check=True)
    remove_tree(home.parents[1])
    assert not home.parents[1].exists()


def test_mounts_in_a_users_folder_are_not_emptied(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (home / "mounted").mkdir()
    mount = 'mount -t tmpfs none "$1" && touch "$1/kept" && mount --bind "$1" "$2/mounted"'
    script = f'{mount} && "$3" -c "$4" "$2"; ls "$1"'
    argv = ["unshare", "--mount", "sh", "-c", script, "sh", str(other), str(home), sys.executable, REMOVE]
    done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True)
    assert done.stdout.split() == ["kept"]


def test_a_plain_user_removes_folders_that_were_closed_to_everyone(home: Path) -> None:
    closed = "import os, sys\nos.chdir(sys.argv[1])\nos.makedirs('a/b/c')\nos.chmod('a/b', 0)\nos.chmod('a', 0o500)"
    subprocess.run([*AS_EVE, sys.executable, "-c", closed, str(home)], check=True)
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([*AS_EVE, sys.executable, "-c", REMOVE, str(home / "a")], env=env, check=True)
    assert list(home.iterdir()) == []


def keep(place: ClusterPlace, run: Path) -> None:
    """Record a run of eve as the controller does."""
    records = RunRecords(Folder(place.folder).runs)
    make_folder(records.folder, 0o700)
    records.write(RunRecord(str(run), EVE))


def status_file(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    write_status(RunFolder(folder).status, RunStatus("train-1", "train", "eve", RunPhase.RUNNING, 1.0, 1.0))


def test_run_folder_that_became_a_link_to_roots_folder_is_not_written_to(tmp_path: Path, home: Path) -> None:
    place, roots = ClusterPlace("one", tmp_path), tmp_path / "roots"
    status_file(roots)
    (home / "train-1").symlink_to(roots)
    keep(place, home / "train-1")
    before = sorted((path.name, path.read_bytes()) for path in roots.iterdir())
    runs = runs_on(place)
    end_in_order(runs)
    write_ends(runs)
    assert sorted((path.name, path.read_bytes()) for path in roots.iterdir()) == before


def test_status_file_that_is_a_pipe_does_not_block_down(tmp_path: Path, home: Path) -> None:
    run = home / "train-1"
    run.mkdir()
    os.mkfifo(RunFolder(run).status)
    os.chown(RunFolder(run).status, EVE, EVE)
    place = ClusterPlace("one", tmp_path)
    keep(place, run)
    found = subprocess.Popen([sys.executable, "-c", READ, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(SOURCE)})
    try:
        assert eventually(lambda: found.poll() is not None, 30) and found.returncode == 0
    finally:
        found.kill()
        found.wait()


READ = """
import sys
from pathlib import Path
from dalsegno.cli.cluster.down import runs_on
from dalsegno.cluster import ClusterPlace
assert runs_on(ClusterPlace("one", Path(sys.argv[1]))) == []
"""


def test_running_run_of_a_user_is_still_listed(tmp_path: Path, home: Path) -> None:
    run = home / "train-1"
    status_file(run)
    for path in (run, *run.iterdir()):
        os.chown(path, EVE, EVE)
    keep(ClusterPlace("one", tmp_path), run)
    assert [each.run for each in runs_on(ClusterPlace("one", tmp_path))] == ["train-1"]
