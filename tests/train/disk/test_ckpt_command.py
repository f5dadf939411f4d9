"""`dalsegno ckpt`: list, verify and convert checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

torch = pytest.importorskip("torch")

from dalsegno.cli.out import size
from dalsegno.cli.training.ckpt import _age, command
from dalsegno.errors import DalsegnoError
from dalsegno.train.disk.folder import lock_folder
from tests.train.disk.states import filled, save
from tests.train.disk.test_round_trip import same, trained


def ckpt(*args: object) -> Result:
    return CliRunner().invoke(command, [str(arg) for arg in args])


def refused(*args: object) -> str:
    error = ckpt(*args).exception
    assert isinstance(error, DalsegnoError)
    return f"{error.what} | {error.hint}"


@pytest.fixture
def two(tmp_path: Path) -> Path:
    for step in (10, 20):
        save(tmp_path, filled(step), step, world=2)
    return tmp_path


def damage(folder: Path) -> None:
    file = folder / "step-000000000010" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"?")


# ls and verify


def test_ls_shows_the_newest_first_and_which_is_the_latest(two: Path) -> None:
    lines = ckpt("ls", two).stdout.splitlines()
    assert lines[0].split() == ["STEP", "AGE", "SIZE", "RANKS", "RUN", "STATE"]
    assert lines[1].split()[0] == "20" and lines[1].endswith("2      run-a  whole, latest")
    assert lines[2].split()[0] == "10" and lines[2].endswith("2      run-a  whole")


def test_ls_shows_missing_files(two: Path) -> None:
    (two / "step-000000000010" / "MANIFEST.json").unlink()
    (two / "step-000000000020" / "__0_0.distcp").unlink()
    _, newest, oldest = ckpt("ls", two).stdout.splitlines()
    assert newest.endswith("damaged: __0_0.distcp cannot be read: No such file or directory")
    assert oldest.startswith("step-000000000010") and "MANIFEST.json cannot be read" in oldest


def test_ls_as_json(two: Path) -> None:
    newest, oldest = json.loads(ckpt("ls", two, "--json").stdout)
    assert newest["step"] == 20 and newest["latest"] and newest["whole"] and newest["faults"] == []
    assert (oldest["world"], oldest["run"], oldest["generation"], oldest["latest"]) == (2, "run-a", 1, False)


def test_verify_reads_every_byte_and_names_the_file(two: Path) -> None:
    fine = ckpt("verify", two)
    assert fine.exit_code == 0 and fine.stdout.count(": whole, 4 files, ") == 2
    damage(two)
    result = ckpt("verify", two)
    assert result.exit_code == 1
    assert "step-000000000010: damaged: __1_0.distcp has checksum" in result.stdout
    assert ckpt("verify", two / "step-000000000020").exit_code == 0
    assert ckpt("verify", two / "latest").exit_code == 0


def test_verify_as_json(two: Path) -> None:
    damage(two)
    result = ckpt("verify", two, "--json")
    assert result.exit_code == 1
    assert [each["whole"] for each in json.loads(result.stdout)] == [True, False]


def test_commands_report_an_empty_or_missing_folder(tmp_path: Path) -> None:
    assert ckpt("ls", tmp_path).exit_code == 0 and ckpt("ls", tmp_path).stdout == ""
    assert "no checkpoints in" in refused("verify", tmp_path)
    assert "no folder" in refused("ls", tmp_path / "nowhere")


def test_verify_does_not_import_torch(two: Path) -> None:
    code = (
        "import sys; from dalsegno.cli.training.ckpt import command; "
        f"command(['verify', {str(two)!r}], standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=100, capture_output=True).returncode == 0


def test_sizes_and_ages_are_readable() -> None:
    assert [size(count) for count in (0, 2048, 3 << 30, 5 << 40)] == ["0 B", "2.0 KiB", "3.0 GiB", "5.0 TiB"]
    assert _age("2020-01-01T00:00:00+00:00").endswith(" d")
    assert _age("2999-01-01T00:00:00+00:00") == "0 s", "written with a clock that was ahead"
    assert _age("yesterday") == "?"


# convert


def training_state() -> dict[str, Any]:
    model, opt = trained(seed=2)
    return {"model": dict(model.state_dict()), "optimizer": opt.state_dict()}


def test_convert_to_a_torch_file_and_back(tmp_path: Path) -> None:
    state = training_state()
    save(tmp_path / _made(tmp_path, "old"), state, 7, world=3)
    result = ckpt("convert", tmp_path / "old", tmp_path / "plain.pt")
    assert result.stdout.strip() == str(tmp_path / "plain.pt")
    assert "not converted: the state of each rank" in result.stderr
    plain = torch.load(tmp_path / "plain.pt")
    assert plain.pop("dalsegno") == {"step": 7} and same(plain, state)

    made = ckpt("convert", tmp_path / "plain.pt", tmp_path / "new").stdout.strip()
    assert made == str(tmp_path / "new" / "step-000000000007")
    ckpt("convert", tmp_path / "new", tmp_path / "again.pt")
    again = torch.load(tmp_path / "again.pt")
    assert again.pop("dalsegno") == {"step": 7} and same(again, state)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_bare_state_dict_is_placed_under_a_name(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    torch.save({"weight": torch.ones(3)}, tmp_path / "bare.pth")
    made = ckpt("convert", tmp_path / "bare.pth", tmp_path / "new", "--under", "model", "--step", "5").stdout.strip()
    assert made.endswith("step-000000000005")
    state = {"model": {"weight": torch.zeros(3)}}
    dcp.load(state, checkpoint_id=made)
    assert state["model"]["weight"].tolist() == [1, 1, 1]


def test_convert_to_safetensors_and_back(tmp_path: Path) -> None:
    state = training_state()
    save(tmp_path / _made(tmp_path, "old"), state, 7)
    result = ckpt("convert", tmp_path / "old" / "latest", tmp_path / "t.safetensors")
    assert "values that are not tensors: optimizer.param_groups.0.lr, " in result.stderr
    made = ckpt("convert", tmp_path / "t.safetensors", tmp_path / "new").stdout.strip()
    assert made.endswith("step-000000000007")
    ckpt("convert", tmp_path / "new", tmp_path / "again.pt")
    again = torch.load(tmp_path / "again.pt")["model"]
    assert same(dict(sorted(again.items())), dict(sorted(state["model"].items())))


def test_error_without_safetensors_names_the_package(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)  # simulates that the package is not installed
    monkeypatch.delitem(sys.modules, "safetensors.torch", raising=False)
    assert "pip install safetensors" in refused("convert", two, two / "t.safetensors")


def test_invalid_conversions_are_refused(two: Path) -> None:
    (two / "there.pt").write_text("mine")
    assert "already exists" in refused("convert", two, two / "there.pt")
    assert "is not a torch.save file" in refused("convert", two / "there.pt", two / "new")
    assert "must be a file" in refused("convert", two, two / "elsewhere")
    assert "must be a file" in refused("convert", two / "a.pt", two / "b.pt")
    assert "no file" in refused("convert", two / "nowhere.pt", two / "new")
    torch.save([1, 2], two / "list.pt")
    assert "holds a list" in refused("convert", two / "list.pt", two / "new")
    assert not (two / "new").exists()


def test_unwritable_target_is_refused_with_a_clear_error(two: Path) -> None:
    assert "the folder no longer exists" in refused("convert", two, two / "nowhere" / "plain.pt")
    (two / ".plain.pt.new").write_text("of a killed process")
    assert ckpt("convert", two, two / "plain.pt").exit_code == 0
    assert not (two / ".plain.pt.new").exists()


def test_old_torch_file_is_read_and_truncated_file_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert ckpt("convert", tmp_path / "old.pt", tmp_path / "new").exit_code == 0
    for name, use_zip in (("old.pt", False), ("new.pt", True)):
        torch.save({"w": torch.ones(2000)}, tmp_path / name, _use_new_zipfile_serialization=use_zip)
        data = (tmp_path / name).read_bytes()
        for length in (0, 10, len(data) // 2, len(data) - 10):
            (tmp_path / name).write_bytes(data[:length])
            assert "is not a torch.save file" in refused("convert", tmp_path / name, tmp_path / "other")


def test_convert_refuses_a_folder_in_use(two: Path) -> None:
    torch.save({"w": torch.ones(2)}, two / "plain.pt")
    lock = lock_folder(two, "a-run", print)
    assert "is in use by a-run" in refused("convert", two / "plain.pt", two)
    lock.release()
    assert ckpt("convert", two / "plain.pt", two).exit_code == 0


def test_damaged_newest_checkpoint_is_skipped_with_a_warning(two: Path) -> None:
    (two / "latest" / "__0_0.distcp").write_bytes(b"")
    result = ckpt("convert", two, two / "plain.pt")
    assert "is damaged, skipping it" in result.stderr
    assert torch.load(two / "plain.pt")["epoch"] == 10


def test_file_with_code_needs_trust(tmp_path: Path) -> None:
    torch.save({"path": Path("x"), "w": torch.ones(1)}, tmp_path / "code.pt")
    assert "--trust" in refused("convert", tmp_path / "code.pt", tmp_path / "new")
    assert ckpt("convert", tmp_path / "code.pt", tmp_path / "new", "--trust").exit_code == 0


def _made(tmp_path: Path, name: str) -> str:
    (tmp_path / name).mkdir()
    return name
