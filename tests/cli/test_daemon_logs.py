"""`dalsegno logs --daemon`: which logs are selected, and how rotated and growing ones are read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from dalsegno.cli.main import cli
from dalsegno.cli.training.logs import LogReader, print_logs, select_logs
from dalsegno.errors import DalsegnoError, NotThere, UsageError
from dalsegno.targets.base import DaemonLog
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.observe import read_daemon_logs

LOGS = [DaemonLog("head", "slurmctld", Path("a")), *(DaemonLog(f"n{i}", "slurmd", Path("b")) for i in (1, 2))]


def test_logs_of_a_daemon_on_all_hosts_or_on_one():
    assert select_logs(LOGS, "slurmd", None) == LOGS[1:]
    assert select_logs(LOGS, "slurmd", "n2") == LOGS[2:]


@pytest.mark.parametrize(
    ("daemon", "node", "hint"), [("slurmdbd", None, "its daemons: slurmctld, slurmd"), ("slurmd", "x", "n1, n2")]
)
def test_unknown_daemon_or_host_is_refused_and_the_known_are_named(daemon: str, node: str | None, hint: str):
    with pytest.raises(NotThere) as caught:
        select_logs(LOGS, daemon, node)
    assert hint in caught.value.hint


def test_rotated_parts_come_first_and_a_last_line_without_end_is_shown(tmp_path: Path):
    log = tmp_path / "x.log"
    for name, text in (("x.log.2", "1\n2\n"), ("x.log.1", "3\n"), ("x.log", "4\n5")):
        (tmp_path / name).write_text(text)
    assert list(LogReader(log).all_lines(final=True)) == ["1", "2", "3", "4", "5"]
    assert list(LogReader(log).all_lines(final=False)) == ["1", "2", "3", "4"]


def test_growing_log_is_read_on_also_after_it_was_emptied_or_replaced(tmp_path: Path):
    log = tmp_path / "x.log"
    reader = LogReader(log)
    assert list(reader.new()) == []
    log.write_text("one\ntw")
    assert list(reader.new()) == ["one"]
    with log.open("a") as file:
        file.write("o\nthree\n")
    assert list(reader.new()) == ["two", "three"]
    os.truncate(log, 0)
    log.write_text("four\n")
    assert list(reader.new()) == ["four"]
    log.rename(tmp_path / "x.log.1")
    log.write_text("five\nsix\n")
    assert list(reader.new()) == ["five", "six"]


def test_log_outside_the_folders_of_the_hosts_is_not_listed(tmp_path: Path):
    """The plan of a cluster that another user created may name any file."""
    host = tmp_path / "hosts/head"
    host.mkdir(parents=True)
    services = [{"name": "slurmctld", "log": str(host / "slurmctld.log")}, {"name": "slurmd", "log": "/etc/shadow"}]
    (host / "plan.json").write_text(json.dumps({"services": services}))
    assert [log.name for log in read_daemon_logs(Folder(tmp_path))] == ["slurmctld", "init"]


def test_link_is_not_followed(tmp_path: Path):
    (tmp_path / "x.log").symlink_to("/etc/shadow")
    with pytest.raises((DalsegnoError, OSError)):
        list(LogReader(tmp_path / "x.log").new())


def test_lines_have_their_host_in_front_and_no_terminal_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    logs = [DaemonLog(name, "slurmd", tmp_path / name) for name in ("n1", "n10")]
    for log in logs:
        log.path.write_text("first\nlast\x1b[2J\n")
    print_logs(logs, 1, follow=False)
    assert capsys.readouterr().out == "n1   last\\x1b[2J\nn10  last\\x1b[2J\n"
    print_logs(logs[:1], None, follow=False)
    assert capsys.readouterr().out == "first\nlast\\x1b[2J\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--daemon", "slurmd", "--rank", "1"], "--rank does not apply to --daemon"),
        (["--daemon", "coordinator", "--node", "n1"], "--node does not apply to --daemon"),
        (["--daemon", "slurmd", "train-abc12"], "slurmd is a daemon of the cluster, not of run train-abc12"),
        (["--lines", "5"], "--lines needs --daemon"),
    ],
)
def test_options_that_exclude_each_other_are_refused(arguments: list[str], message: str):
    refused = CliRunner().invoke(cli, ["logs", *arguments]).exception
    assert isinstance(refused, UsageError) and message in refused.what
