"""A checkpoint of another user runs no code, neither in `ckpt convert` nor when training resumes.

The pickle in the checkpoint would create a harmless file when it is loaded.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.checkpointer import Checkpointer
from dalsegno.train.disk.convert import _save
from dalsegno.train.disk.load import NotPlainValue, load_plain
from dalsegno.train.errors import CheckpointError
from tests.security.poison import Poison

STRANGER = 64203


@pytest.fixture
def loaded(tmp_path: Path) -> Path:
    return tmp_path / "loaded"


def poisoned(folder: Path, target: Path) -> Path:
    """Return a checkpoint with a valid manifest and code in the values that are not tensors."""
    path = _save(folder, {"model": {**torch.nn.Linear(2, 2).state_dict(), "note": Poison(target)}}, step=3)
    target.unlink(missing_ok=True)  # saving created the file, not loading
    return path


def convert(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dalsegno", "ckpt", "convert", *words], capture_output=True, text=True, check=False
    )


@pytest.mark.cluster  # processes with torch: too slow for the unit part
@pytest.mark.parametrize("target", ["plain.pt", pytest.param("plain.safetensors", marks=pytest.mark.long)])
def test_convert_runs_no_code_in_a_checkpoint(tmp_path: Path, loaded: Path, target: str) -> None:
    source = poisoned(tmp_path / "theirs", loaded)
    done = convert(str(source), str(tmp_path / target))
    assert not loaded.exists()
    if target.endswith(".pt"):
        assert done.returncode == 1 and "more than tensors and plain values" in done.stderr
        assert "--trust" in done.stderr


@pytest.mark.cluster  # processes with torch: too slow for the unit part
def test_convert_with_trust_loads_everything(tmp_path: Path, loaded: Path) -> None:
    source = poisoned(tmp_path / "ours", loaded)
    done = convert(str(source), str(tmp_path / "all.pt"), "--trust")
    assert done.returncode == 0 and loaded.exists(), done.stderr


@pytest.mark.cluster  # processes with torch: too slow for the unit part
def test_convert_without_trust_loads_what_trainings_usually_save(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    steps = Checkpointer(tmp_path / "ckpt", model=model, optimizer=optimizer, disk_every=1)
    for _ in steps.steps(2):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        steps.done()
    done = convert(str(tmp_path / "ckpt"), str(tmp_path / "plain.pt"))
    assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / "plain.pt", weights_only=True)["dalsegno"] == {"step": 2}


@pytest.mark.cluster  # processes with torch: too slow for the unit part
@pytest.mark.skipif(os.getuid() != 0, reason="only root can create files of other users")
@pytest.mark.parametrize("how", ["owner", "mode"])
def test_a_training_resumes_from_a_strangers_checkpoint_without_running_its_code(
    tmp_path: Path, loaded: Path, how: str
) -> None:
    """An example is a folder in /tmp that another user created first."""
    for path in poisoned(tmp_path / "ckpt", loaded).iterdir():
        os.chown(path, STRANGER, STRANGER) if how == "owner" else path.chmod(0o666)
    with pytest.raises(CheckpointError, match="more than tensors and plain values"):
        Checkpointer(tmp_path / "ckpt", model=torch.nn.Linear(2, 2))
    assert not loaded.exists()


@pytest.mark.cluster  # processes with torch: too slow for the unit part
@pytest.mark.skipif(os.getuid() != 0, reason="only root can create files of other users")
def test_a_training_resumes_from_a_colleagues_plain_checkpoint(tmp_path: Path) -> None:
    for total in (2, 4):
        model = torch.nn.Linear(2, 2)
        steps = Checkpointer(tmp_path / "ckpt", model=model, optimizer=torch.optim.AdamW(model.parameters()))
        assert list(_done(steps, total)) == [total - 2, total - 1]
        for path in (tmp_path / "ckpt" / f"step-{total:012d}").iterdir():
            os.chown(path, STRANGER, STRANGER)


def _done(steps: Checkpointer, total: int) -> Any:
    for step in steps.steps(total):
        yield step
        steps.done(step)


def test_plain_pickle_loads_only_plain_values() -> None:
    named: list[Any] = [os.system, Path("/"), torch.nn.Linear(1, 1), eval, torch.load]
    of_a_class = b"cbuiltins\ngetattr\n(cbuiltins\ndict\nS'__class__'\ntR."
    for raw in (*map(pickle.dumps, named), of_a_class):
        with pytest.raises(NotPlainValue):
            load_plain(raw)
