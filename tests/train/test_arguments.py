"""What a script gives that cannot be meant is refused at once, in words that say what would be right."""

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
    ("options", "words"),
    [
        ({"memory_every": "often"}, "memory_every='often' is no interval"),  # alone, where it has no meaning, too
        ({"disk_every": "auto"}, "disk_every='auto' is no interval"),
        ({"keep": 0}, "keep=0"),
        ({"keep": "3"}, "keep='3'"),
        ({"keep_every": 0}, "keep_every=0"),
        ({"grace_s": "25s"}, "grace_s='25s'"),
        ({"signals": signal.SIGUSR1}, "signals="),
        ({"signals": (9,)}, "no signals that can be heard"),
        ({"disc_every": 10}, "did you mean `disk_every`?"),
        ({"keep_last": 10}, "`keep_last` (int) has no state_dict"),
        ({"model": None}, "nothing to save"),
        ({"data": [1, 2, 3]}, "a list cannot tell its place"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    assert words in refused(tmp_path / "ckpt", **options)
    assert not (tmp_path / "ckpt").exists(), "nothing was touched"


def test_a_folder_that_cannot_be_made_says_why_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "no name" in refused("")
    assert "something that is no folder is in its place" in refused(tmp_path / "file" / "ckpt")
    assert "something that is no folder is in its place" in refused(tmp_path / "file")


def test_the_older_name_for_the_data_is_still_known(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    loader = torch.utils.data.DataLoader(torch.ones(8, 1), batch_size=4)
    ckpt = Checkpointer(tmp_path, model=model, sampler=loader.sampler)
    assert next(ckpt.epochs(1)) == 0
