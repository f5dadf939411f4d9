"""`dalsegno --help` groups the commands by task."""

from __future__ import annotations

from importlib.util import find_spec

import click
import pytest
from click.testing import CliRunner

from dalsegno.cli.main import COMMANDS, cli, find_module


def grouped_commands() -> dict[str, list[str]]:
    """Return the commands below each heading of the help text."""
    groups: dict[str, list[str]] = {}
    heading = ""
    for line in CliRunner().invoke(cli, ["--help"]).output.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            heading = line[:-1]
        elif line.startswith("  ") and line[2] != " " and heading not in ("", "Options"):
            groups.setdefault(heading, []).append(line.split()[0])
    return groups


def test_commands_are_grouped_by_task():
    groups = grouped_commands()
    assert list(groups) == ["Cluster", "Training", "Health", "Containers", "Measure", "Other"]
    assert {"up", "status", "down"} <= set(groups["Cluster"])
    assert {"run", "logs", "ckpt"} <= set(groups["Training"])
    assert {"nodes", "events", "why"} <= set(groups["Health"])


def test_each_command_is_in_one_group():
    shown = [name for names in grouped_commands().values() for name in names]
    assert sorted(shown) == sorted(set(shown)) == sorted(COMMANDS)
    assert [name for name in shown if find_spec(find_module(name)) is None] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_lists_of_subcommands_are_not_cut_off(name: str):
    group = cli.get_command(click.Context(cli), name)
    if isinstance(group, click.Group):
        listed = CliRunner().invoke(cli, [name, "--help"], terminal_width=80).output.partition("\nCommands:\n")[2]
        assert [line for line in listed.splitlines() if line.endswith(("...", "…"))] == []
