"""The wait that most tests of processes lean on."""

from pathlib import Path

import pytest

from tests.waiting import eventually


def test_what_is_not_there_yet_is_waited_for_and_what_was_found_is_given(tmp_path: Path):
    asked = []

    def third_line() -> str:
        asked.append(1)
        with (tmp_path / "said").open("a") as file:
            file.write(f"{len(asked)}\n")
        return (tmp_path / "said").read_text().splitlines()[2]

    assert eventually(third_line, every_s=0) == "3" and len(asked) == 3


def test_what_does_not_happen_is_told_with_what_was_seen_last(tmp_path: Path):
    with pytest.raises(AssertionError, match=r"did not happen in 0 s; it was last \[\]"):
        eventually(lambda: [], timeout_s=0)
    with pytest.raises(AssertionError, match=r"it was last FileNotFoundError: .*said"):
        eventually(lambda: (tmp_path / "said").read_text(), timeout_s=0)


def test_what_can_not_become_true_any_more_is_not_waited_for():
    def died() -> bool:
        raise AssertionError("it has died")

    with pytest.raises(AssertionError, match="it has died"):
        eventually(died)
