"""Logs of the daemons: one line per event, escaped, rotated, and harmless when the disk is full."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno import log
from dalsegno.errors import UsageError
from dalsegno.log import LEVEL, check_level, set_level, start_logging


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, raises = list(root.handlers), root.level, logging.raiseExceptions
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.raiseExceptions = raises


def test_line_has_time_level_component_and_message(tmp_path: Path):
    start_logging("controller", tmp_path / "log").warning("refused uid %d", 4711)
    line = (tmp_path / "log").read_text()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d WARNING controller: refused uid 4711\n", line)


def test_message_cannot_forge_a_line_or_reach_the_terminal(tmp_path: Path):
    start_logging("controller", tmp_path / "log").info("job \x1b[2J\n2026-01-01T00:00:00 INFO controller: all is well")
    first, second = (tmp_path / "log").read_text().splitlines()
    assert "\\x1b[2J" in first and second.startswith("    2026")


def test_log_is_rotated_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log, "MAX_BYTES", 1000)
    logger = start_logging("coordinator", tmp_path / "log")
    for number in range(100):
        logger.info("step %d", number)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1", "log.2"]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert (tmp_path / "log").read_text().endswith("step 99\n")


def test_environment_chooses_the_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(LEVEL, "debug")
    start_logging("a", tmp_path / "log").debug("seen")
    monkeypatch.setenv(LEVEL, "nonsense")
    logger = start_logging("a", tmp_path / "log")
    logger.debug("not seen")
    logger.info("seen too")
    assert [line.rpartition(": ")[2] for line in (tmp_path / "log").read_text().splitlines()] == ["seen", "seen too"]


def test_level_of_another_environment_takes_its_place(tmp_path: Path):
    logger = start_logging("coordinator", tmp_path / "log")
    for value in ("error", "nonsense", ""):
        set_level({LEVEL: value})
        logger.warning("not seen")
    set_level({LEVEL: "warning"})
    logger.warning("seen")
    assert (tmp_path / "log").read_text().endswith(" WARNING coordinator: seen\n")
    assert len((tmp_path / "log").read_text().splitlines()) == 1


@pytest.mark.parametrize(("value", "level"), [("debug", "debug"), ("WARNING", "warning"), ("", "")])
def test_known_level_is_accepted_in_any_case(value: str, level: str):
    assert check_level({LEVEL: value}) == level
    assert check_level({}) == ""


@pytest.mark.parametrize("value", ["verbose", "10", "critical"])
def test_unknown_level_is_refused_with_the_known_ones(value: str):
    with pytest.raises(UsageError) as refused:
        check_level({LEVEL: value})
    assert refused.value.what == f"DALSEGNO_LOG_LEVEL={value} is not a log level"
    assert refused.value.hint == "use one of debug, info, warning, error"


def test_log_that_cannot_be_written_raises_nothing(tmp_path: Path):
    start_logging("a", Path("/dev/full")).info("lost")
    start_logging("a", tmp_path / "no" / "such" / "folder").info("on standard error")
