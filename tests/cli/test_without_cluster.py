"""Commands about nodes on a machine that has Slurm's commands, but no cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from dalsegno.cli.main import cli
from dalsegno.errors import NotThere

COMMANDS = [
    ["nodes"],
    ["nodes", "--json"],
    ["nodes", "show", "train-1"],
    ["nodes", "replace", "train-1"],
    ["nodes", "reboot", "train-1"],
    ["nodes", "hostfile"],
    ["nodes", "forgive", "train-1"],
    ["events"],
    ["events", "--json"],
    ["automation", "status"],
]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str | None]:
    """Return the environment of a machine whose Slurm commands find no slurm.conf."""
    for name in ("sinfo", "scontrol", "srun"):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{name}: fatal: Could not establish a configuration source' >&2\nexit 1\n")
        program.chmod(0o755)
    empty: dict[str, str | None] = dict.fromkeys(("SLURM_CONF", "DALSEGNO_CLUSTER", "DALSEGNO_CONTROLLER"))
    return {**empty, "DALSEGNO_HOME": str(tmp_path / "home"), "PATH": f"{tmp_path}:/usr/bin:/bin"}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_command_without_a_cluster_says_how_to_create_one(env, words):
    done = CliRunner().invoke(cli, words, env=env)
    assert isinstance(done.exception, NotThere) and done.stdout == ""
    assert done.exception.what == "there is no cluster yet" and "`dalsegno up`" in done.exception.hint


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_command_for_an_unknown_cluster_names_it(env, words):
    done = CliRunner().invoke(cli, [*words, "-M", "nope"], env=env)
    assert isinstance(done.exception, NotThere) and done.stdout == ""
    assert done.exception.what == "there is no cluster `nope`"
