"""Logs of the daemons: one line per event, escaped, rotated, and harmless when the disk is full."""

from __future__ import annotations

import fcntl
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno import log
from dalsegno.errors import UsageError
from dalsegno.log import LEVEL, LOCK, LOG_FILE, check_level, look_at_logs, rotate, set_level, start_logging


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


def test_log_that_systemd_appends_to_is_rotated_by_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mine, other = tmp_path / "controller.log", tmp_path / "prometheus.log"
    other.write_text("x" * 1001)
    monkeypatch.setattr(log, "MAX_BYTES", 1000)
    monkeypatch.setattr(log, "LOOK_S", 0.0)
    monkeypatch.setenv(LOG_FILE, str(mine))
    with mine.open("a") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        logger = start_logging("controller")
        for number in range(100):
            logger.info("step %d", number)
        print("Traceback of a crash", file=stderr)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    names = [LOCK, "controller.log", "controller.log.1", "controller.log.2", "prometheus.log", "prometheus.log.1"]
    assert sorted(sizes) == names and max(sizes.values()) <= 1000 and sizes["prometheus.log"] == 0
    assert mine.read_text().endswith("Traceback of a crash\n")
    assert (tmp_path / "controller.log.1").read_text().count("\n") > 1, "each line is in one of the parts"


def test_controller_rotates_logs_of_other_programs_without_logging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log, "MAX_BYTES", 1000)
    monkeypatch.setenv(LOG_FILE, str(tmp_path / "controller.log"))
    start_logging("controller")
    (tmp_path / "prometheus.log").write_text("x" * 1001)
    look_at_logs()
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "prometheus.log", "prometheus.log.1"]


def test_log_that_another_daemon_rotates_is_left_alone(tmp_path: Path):
    path = tmp_path / "controller.log"
    path.write_text("x" * 100)
    with (tmp_path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not rotate(str(path), most_bytes=10) and path.stat().st_size == 100
    assert rotate(str(path), most_bytes=10) and path.stat().st_size == 0


def test_a_reader_that_locks_a_log_does_not_stop_its_rotation(tmp_path: Path):
    path = tmp_path / "controller.log"
    path.write_text("x" * 100)
    path.chmod(0o640)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert rotate(str(path), most_bytes=10)
    modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir()}
    assert modes == {"controller.log": 0o640, "controller.log.1": 0o640, LOCK: 0o600}


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
