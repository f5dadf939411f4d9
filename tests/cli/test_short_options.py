"""A short option means the same in all commands and in Slurm."""

from __future__ import annotations

import click

from dalsegno.cli.main import COMMANDS, cli


def meanings(letter: str) -> set[str]:
    """Return the long options of a short option, over all commands."""
    commands = [command for name in COMMANDS if (command := cli.get_command(click.Context(cli), name))]
    options = [option for command in commands for option in command.params if isinstance(option, click.Option)]
    return {
        option.opts[-1] if option.opts[0] == letter else option.opts[0] for option in options if letter in option.opts
    }


def test_short_options_mean_the_same_as_in_slurm() -> None:
    assert meanings("-c") == {"--cpus-per-task"}
    assert meanings("-M") == {"--cluster"}
