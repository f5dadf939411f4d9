"""Tests of files that get their name only when they are complete, and of waiting for locks."""

import errno
import os
import threading
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.system.files import in_turn, nameless


@pytest.fixture(params=["as this file system can", "where it cannot"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with and without O_TMPFILE: some file systems need a hidden file instead."""
    if request.param == "where it cannot":
        real = os.open

        def refusing(path: object, flags: int, *rest: int, **more: int) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "not here")
            return real(path, flags, *rest, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "open", refusing)


@pytest.mark.usefixtures("way")
def test_nameless_file_is_named_when_complete(tmp_path: Path):
    (tmp_path / "image").write_text("old")
    with nameless(tmp_path / "image") as handle:
        os.write(handle, b"new")
        assert (tmp_path / "image").read_text() == "old"
    assert (tmp_path / "image").read_text() == "new" and os.listdir(tmp_path) == ["image"]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_unfinished_nameless_file_leaves_nothing(tmp_path: Path, error: type[BaseException]):
    with pytest.raises(error), nameless(tmp_path / "image") as handle:
        os.write(handle, b"half")
        raise error
    assert os.listdir(tmp_path) == []


def test_missing_folder_raises_an_error(tmp_path: Path):
    with pytest.raises(DalsegnoError) as caught, nameless(tmp_path / "no" / "image"):
        pass
    assert caught.value.hint


def test_waiting_for_a_lock_calls_back_and_takes_it_next(tmp_path: Path):
    order: list[str] = []
    waiting = threading.Event()

    def second() -> None:
        with in_turn(tmp_path / "lock", waiting.set):
            order.append("second")

    with in_turn(tmp_path / "lock"):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(60)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_shared_lock_holders_do_not_wait(tmp_path: Path):
    with in_turn(tmp_path / "lock", shared=True), in_turn(tmp_path / "lock", pytest.fail, shared=True):
        pass
