"""The stack's own commands on the controller: they and their options exist in the published releases."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from dalsegno.targets.oci.head import describe_command, reboot_command, replace_commands

RECORDED = Path(__file__).parents[2] / "recorded"
FOLDERS = {"v2.10": "oci-hpc-2.10.6", "v3": "oci-hpc-3.1.0"}


def options_of(release: str) -> dict[str, set[str]]:
    rows = list(csv.reader((RECORDED / FOLDERS[release] / "commands.csv").read_text().splitlines()))[1:]
    return {command: set(options.split()) for command, options in rows}


def unknown_words(release: str, argv: Sequence[str]) -> list[str]:
    """Return the options that the release does not declare for this command, or the command if it has none like it."""
    line = f"{shlex.join(argv)} "
    known = next((options for command, options in options_of(release).items() if line.startswith(f"{command} ")), None)
    if known is None:
        return [line.strip()]
    return [word for word in argv if word.startswith("--") and word not in known]


@pytest.mark.parametrize("release", FOLDERS)
def test_replacement_uses_commands_and_options_of_the_release(release: str):
    commands = replace_commands(release, "compute-1", "demo-train")
    if release == "v3":
        commands += [describe_command("compute-1"), reboot_command(release, "compute-1")]
    assert [unknown for argv in commands for unknown in unknown_words(release, argv)] == []


def test_recorded_commands_find_a_wrong_option_and_a_wrong_command():
    assert unknown_words("v3", ["mgmt", "nodes", "reboot", "--node", "a"]) == ["--node"]
    assert unknown_words("v3", ["mgmt", "nodes", "replace", "--nodes", "a"]) == ["mgmt nodes replace --nodes a"]
