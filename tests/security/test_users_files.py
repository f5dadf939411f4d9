"""Root reads run folders and health findings of users, who may leave links, pipes and files of others there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.health import Finding, passed
from dalsegno.health.cache import keep, read_kept
from dalsegno.runs import journal
from dalsegno.runs.files import open_log
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.logs import RunLogs
from dalsegno.runs.status import read_status
from tests.cli.runs import end, make_run, say
from tests.cluster.conftest import WARM_CLI
from tests.security.other_user import as_user

pytestmark = [
    pytest.mark.cluster,  # starts the CLI as several users
    pytest.mark.skipif(os.getuid() != 0, reason="only root can be two other users"),
]

VICTIM, ATTACKER = 64211, 64212
SECRET = "only root may read this"
NOW = 1_700_000_000.0


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp: everyone can create files in it, and change only their own."""
    folder = Path(tempfile.mkdtemp(prefix="dalsegno-shared-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def run(shared: Path) -> RunFolder:
    """A run of the attacker, in a folder with runs of several users."""
    run = make_run(shared)
    end(run, nodes=())
    journal.append(run.journal, 100.0, "ended", code=0, why="done")
    say(run, 1, 0, "hello\n")
    give(run.root)
    return run


def give(path: Path, uid: int = ATTACKER) -> None:
    for each in (path, *path.rglob("*")):
        os.chown(each, uid, uid, follow_symlinks=False)


def secret_in(folder: Path, text: str) -> Path:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(0o600)
    return path


def dalsegno(run: RunFolder, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as root, from a warm process. If the command blocks on a pipe, the timeout fails the test."""
    home = run.root.parent
    env = {**os.environ, "DALSEGNO_RUNS": str(home), "DALSEGNO_HOME": str(home / "none"), "SLURM_CONF": "/nonexistent"}
    return WARM_CLI.run(words, env, home, 60)


COMMANDS = (["runs"], ["runs", "show", "train-k3f9x"], ["why", "train-k3f9x"], ["logs", "train-k3f9x"])


def test_root_reads_the_run_of_another_user(run: RunFolder) -> None:
    results = [dalsegno(run, *words) for words in COMMANDS]
    assert [done.returncode for done in results] == [0, 0, 0, 0], results
    assert (
        "done" in results[0].stdout and "run train-k3f9x is done" in results[2].stdout and "hello" in results[3].stdout
    )


Trap = Callable[[Path, Path], object]  # takes the path, and a file that only root can read
TRAPS: dict[str, Trap] = {
    "a link": lambda path, secret: path.symlink_to(secret),
    "a pipe": lambda path, secret: os.mkfifo(path),
    "another user's file": lambda path, secret: shutil.copy2(secret, path),
}


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("name", ["status.json", "plan.json", "journal.jsonl", "logs/g0001/rank0.log", "logs/g0001"])
def test_root_reads_only_regular_files_of_the_runs_owner(run: RunFolder, tmp_path: Path, name: str, trap: str) -> None:
    """The target of the trap looks like the run's own file, so that it would be shown."""
    path = run.root / name
    texts = {"status.json": (run.status.read_text().replace("train-k3f9x", SECRET)),
             "journal.jsonl": json.dumps({"at": 1.0, "event": "note", "text": SECRET}) + "\n"}  # fmt: skip
    secret = secret_in(tmp_path, texts.get(name, SECRET))
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if name == "logs/g0001":
        (tmp_path / "rank0.log").write_text(SECRET)
        secret = tmp_path if trap == "a link" else secret
    TRAPS[trap](path, secret)
    if trap != "another user's file":
        os.chown(path, ATTACKER, ATTACKER, follow_symlinks=False)
    for words in COMMANDS:
        done = dalsegno(run, *words)
        assert SECRET not in done.stdout + done.stderr, (words, done)
        assert "Traceback" not in done.stderr, (words, done)


def test_a_link_of_one_user_to_the_run_of_another_is_not_followed(shared: Path, tmp_path: Path) -> None:
    victims = make_run(tmp_path, "hidden-k3f9x")
    give(victims.root, VICTIM)
    as_user(ATTACKER, lambda: (shared / "hidden-k3f9x").symlink_to(victims.root))
    with pytest.raises(DalsegnoError, match="is not read"):
        read_status(RunFolder(shared / "hidden-k3f9x").status)
    os.unlink(shared / "hidden-k3f9x")
    (shared / "hidden-k3f9x").symlink_to(victims.root)  # this link belongs to root
    assert read_status(RunFolder(shared / "hidden-k3f9x").status)


def test_huge_files_of_another_user_cost_root_little_memory(run: RunFolder) -> None:
    with run.status.open("w") as file:
        file.truncate(1 << 40)
    with pytest.raises(DalsegnoError, match="longer than"):
        read_status(run.status)
    with run.journal.open("r+b") as file:
        file.seek(1 << 40)
        file.write(b'\n{"at": 2.0, "event": "last"}\n')
    assert [entry["event"] for entry in journal.read(run.journal)] == ["last"]
    with run.log(1, 0).open("w") as file:
        file.truncate(1 << 24)
    assert max(len(line.text) for line in RunLogs(run).lines(0.0, final=True)) < 1 << 20, "the line has no end"


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"at": "x", "event": 1}', '{"at": 1e999, "event": "ended"}', '{"event": "ended"}']
)
def test_malformed_journal_line_hides_no_other_entry(run: RunFolder, text: str) -> None:
    with run.journal.open("a") as file:
        file.write(text + "\n")
    assert [entry["event"] for entry in journal.read(run.journal)] == ["ended"]


@pytest.mark.parametrize("field", ["created", "updated", "ended"])
@pytest.mark.parametrize("value", ["NaN", "1e999"])
def test_malformed_status_hides_no_other_run(run: RunFolder, field: str, value: str) -> None:
    status = json.loads(run.status.read_text())
    run.status.write_text(json.dumps({**status, field: "X"}).replace('"X"', value))
    other = make_run(run.root.parent, "other-abcde")
    end(other)
    done = dalsegno(run, "runs")
    assert done.returncode == 0 and "other-abcde" in done.stdout and "damaged" in done.stderr, done


def test_file_read_is_the_one_that_was_checked(run: RunFolder, tmp_path: Path) -> None:
    """The open descriptor is checked, because the name can be given to another file before it is read."""
    path = run.log(1, 0)
    with open(open_log(run, path), "rb") as file:
        path.unlink()
        path.symlink_to(secret_in(tmp_path, SECRET))
        assert file.read() == b"hello\n"


# Findings of health checks


GOOD = Finding("disk", passed("room"), NOW - 10)


def test_findings_are_not_stored_below_a_folder_of_another_user(shared: Path) -> None:
    """Anyone can create `/tmp/dalsegno-UID`, and could then replace `health` in it at any time."""
    path = shared / f"dalsegno-{VICTIM}" / "health" / "gpu-1.json"
    as_user(ATTACKER, lambda: path.parent.parent.mkdir(mode=0o777))
    path.parent.parent.chmod(0o777)
    as_user(VICTIM, lambda: keep(path, "gpu-1", [GOOD]))
    assert list(path.parent.parent.iterdir()) == []


def test_findings_below_a_folder_of_another_user_are_ignored(shared: Path) -> None:
    above = shared / "own"
    path = above / "health" / "gpu-1.json"
    as_user(VICTIM, lambda: keep(path, "gpu-1", [GOOD]))
    assert as_user(VICTIM, lambda: read_kept(path, NOW)) == {"disk": GOOD}
    os.chown(above, ATTACKER, ATTACKER)
    above.chmod(0o755)
    assert as_user(VICTIM, lambda: read_kept(path, NOW)) == {}


@pytest.mark.parametrize("trap", TRAPS)
def test_only_a_regular_file_of_the_same_user_is_trusted(shared: Path, trap: str) -> None:
    path = shared / "own" / "health" / "gpu-1.json"
    as_user(VICTIM, lambda: keep(path, "gpu-1", [GOOD]))
    others = shared / "others.json"
    shutil.copy(path, others)
    os.chown(others, ATTACKER, ATTACKER)
    others.chmod(0o644)
    path.unlink()
    TRAPS[trap](path, others)
    if trap == "another user's file":
        os.chown(path, ATTACKER, ATTACKER)
    assert as_user(VICTIM, lambda: read_kept(path, NOW)) == {}
