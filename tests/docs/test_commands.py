"""Commands, options and files that a page names exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from dalsegno.cli.main import cli
from dalsegno.runs.torchrun.args import FLAGS
from tests.docs.blocks import FENCE, PAGES, ROOT

SPAN = re.compile(r"`([^`\n]+)`")
INDENTED = re.compile(r"^    (.+)$", re.MULTILINE)
CALL = re.compile(r"(?:^|[\s/])dalsegno((?: +[^\s|;&#)>]+)+)")
PATH = re.compile(r"(?:src|tests|docs|benchmarks|examples|scripts)/[\w./-]*")
CONTAINER_OPTION = re.compile(r"--((?:no-)?container-[a-z-]+)")
OF_THE_WRAPPER = ("COMMAND", "setup")  # a placeholder for any command, and a command that only `./dalsegno` has
WITH_A_SCRIPT = ("run", "torchrun", "submit", "shell")  # their options end where the script or command starts

every_page = pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)


@every_page
def test_every_command_and_option_on_a_page_exists(page: Path):
    assert [call for call in calls(page.read_text()) if unknown_word(call.split())] == []


def calls(text: str) -> Iterator[str]:
    """Yield the arguments of `dalsegno` in the code of a page: spans, blocks and indented lines."""
    code = [*SPAN.findall(FENCE.sub("", text)), *INDENTED.findall(text)]
    code += [line.removeprefix("$ ") for block in FENCE.finditer(text) for line in block[3].splitlines()]
    yield from (found[1].strip() for line in code for found in CALL.finditer(line))


def unknown_word(words: list[str]) -> str:
    """Return the first command or option that the program does not have."""
    name, command, rest = "dalsegno", cli, list(words)
    while isinstance(command, click.Group) and rest and not rest[0].startswith(("-", "[")):
        name = rest.pop(0)
        found = command.get_command(click.Context(command), name)
        if found is None:
            return "" if name in OF_THE_WRAPPER else name
        command = found
    switches = switches_of(name, command)
    while rest:
        option, _, value = rest.pop(0).strip("[]").partition("=")
        if option == "--" or (name in WITH_A_SCRIPT and not option.startswith(("-", "…"))):
            return ""
        if option.startswith("-") and option not in switches:
            return option
        if option.startswith("-") and not switches[option] and not value:
            rest = rest[1:]
    return ""


def switches_of(name: str, command: click.Command) -> dict[str, bool]:
    """Return the options of a command, and whether each is a switch, which takes no value."""
    if name == "torchrun":
        return {"--help": True} | {each: flag.switch for flag in FLAGS for each in flag.spellings}
    options = [option for option in command.get_params(click.Context(command)) if isinstance(option, click.Option)]
    return {"--help": True} | {each: option.is_flag for option in options for each in option.opts}


@pytest.mark.parametrize(
    ("call", "unknown"),
    [
        ("--version", ""),
        ("down --yes", ""),
        ("up --force", "--force"),
        ("stats", "stats"),
        ("image import NAME --own", ""),
        ("image imprt NAME", "imprt"),
        ("run --nodes 2 train.py --lr 1", ""),
        ("run … SCRIPT", ""),
        ("run --nods 2 train.py", "--nods"),
        ("torchrun --nproc-per-node 2 train.py", ""),
        ("torchrun --nodes 2 train.py", "--nodes"),
        ("logs RUN [-f] [--rank R]", ""),
        ("logs RUN [-f] [--rnk R]", "--rnk"),
        ("shell -- sinfo -N", ""),
    ],
)
def test_unknown_commands_and_options_are_found(call: str, unknown: str):
    assert list(calls(f"Use `sudo ./dalsegno {call}` here.")) == [call]
    assert unknown_word(call.split()) == unknown


def test_the_page_about_containers_has_all_options_of_the_plugin():
    source = (ROOT / "src/dalsegno/native/options.c").read_text()
    known = set(re.findall(r'\{"((?:no-)?container-[a-z-]+)"', source))
    assert set(CONTAINER_OPTION.findall((ROOT / "docs/containers.md").read_text())) == known


@every_page
def test_every_file_of_the_repository_on_a_page_exists(page: Path):
    named = {path for span in SPAN.findall(FENCE.sub("", page.read_text())) for path in PATH.findall(span)[:1]}
    assert sorted(path for path in named if not (ROOT / path).exists()) == []
