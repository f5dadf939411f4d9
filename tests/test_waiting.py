"""Tests of `eventually`, which most process tests use."""

from pathlib import Path

import pytest

from tests.waiting import eventually


def test_eventually_waits_and_returns_the_value(tmp_path: Path):
    asked = []

    def third_line() -> str:
        asked.append(1)
        with (tmp_path / "said").open("a") as file:
            file.write(f"{len(asked)}\n")
        return (tmp_path / "said").read_text().splitlines()[2]

    assert eventually(third_line, every_s=0) == "3" and len(asked) == 3


def test_timeout_reports_the_last_value(tmp_path: Path):
    with pytest.raises(AssertionError, match=r"did not happen in 0 s; it was last \[\]"):
        eventually(lambda: [], timeout_s=0)
    with pytest.raises(AssertionError, match=r"it was last FileNotFoundError: .*said"):
        eventually(lambda: (tmp_path / "said").read_text(), timeout_s=0)


def test_failed_assertion_ends_the_wait():
    def died() -> bool:
        raise AssertionError("it has died")

    with pytest.raises(AssertionError, match="it has died"):
        eventually(died)
