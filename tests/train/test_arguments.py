"""Invalid arguments of Checkpointer are refused at once, with the valid form."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train import Checkpointer, CheckpointError


def refused(folder: Path | str, **options: Any) -> str:
    model = options.pop("model", torch.nn.Linear(1, 1))
    with pytest.raises((CheckpointError, ValueError)) as error:
        Checkpointer(folder, model=model, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"memory_every": "often"},
            "invalid interval memory_every='often'",
        ),  # refused even without a launcher, where the option is not used
        ({"disk_every": "auto"}, "invalid interval disk_every='auto'"),
        ({"keep": 0}, "keep=0"),
        ({"keep": "3"}, "keep='3'"),
        ({"keep_every": 0}, "keep_every=0"),
        ({"grace_s": "25s"}, "grace_s='25s'"),
        ({"signals": signal.SIGUSR1}, "signals="),
        ({"signals": (9,)}, "not signals that can be caught"),
        ({"disc_every": 10}, "did you mean `disk_every`?"),
        ({"keep_last": 10}, "`keep_last` (int) has no state_dict"),
        ({"model": None}, "nothing to save"),
        ({"data": [1, 2, 3]}, "a list cannot save its position"),
    ],
)
def test_invalid_option_is_refused(tmp_path: Path, options: dict[str, Any], error: str) -> None:
    assert error in refused(tmp_path / "ckpt", **options)
    assert not (tmp_path / "ckpt").exists(), "nothing was touched"


def test_folder_that_cannot_be_created_is_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "an empty string" in refused("")
    assert "a file has that name" in refused(tmp_path / "file" / "ckpt")
    assert "a file has that name" in refused(tmp_path / "file")


def test_former_option_name_sampler_still_works(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    loader = torch.utils.data.DataLoader(torch.ones(8, 1), batch_size=4)
    ckpt = Checkpointer(tmp_path, model=model, sampler=loader.sampler)
    assert next(ckpt.epochs(1)) == 0
