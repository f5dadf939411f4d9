"""Commands, options and files that a page names exist, and commands in messages take the arguments given there."""

import ast
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


def test_commands_in_messages_have_no_surplus_arguments():
    files = sorted((ROOT / "src").rglob("*.py"))
    found = {call: surplus_words(call.split()) for file in files for call in calls_in_messages(file.read_text())}
    assert {call: words for call, words in found.items() if words} == {}


def calls_in_messages(source: str) -> Iterator[str]:
    """Yield the arguments of `dalsegno` in backticks in the strings of a module. A value in a string is a `VALUE`.

    Templates of Prometheus and usage lines are left out.
    """
    for node in ast.walk(ast.parse(source)) if "`dalsegno " in source else ():
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "VALUE" for part in parts)
        calls = (span.removeprefix("dalsegno ") for span in SPAN.findall(text) if span.startswith("dalsegno "))
        yield from (call for call in calls if "{{" not in call and "[OPTIONS]" not in call)


def surplus_words(words: list[str]) -> list[str]:
    """Return the arguments that the command does not take."""
    command, rest = cli, list(words)
    while isinstance(command, click.Group) and rest:
        command = command.get_command(click.Context(command), rest.pop(0))
    if command is None or isinstance(command, click.Group):
        return []
    try:
        return command.make_parser(click.Context(command)).parse_args(rest)[1]
    except click.UsageError:
        return []  # an option without its value


def test_surplus_arguments_in_messages_are_found():
    found = list(calls_in_messages('say(f"use `dalsegno health {node} --line` or `dalsegno up`", "`dalsegno why x`")'))
    assert sorted(found) == ["health VALUE --line", "up", "why x"]
    assert [surplus_words(call.split()) for call in sorted(found)] == [["VALUE"], [], []]


def test_the_page_about_containers_has_all_options_of_the_plugin():
    source = (ROOT / "src/dalsegno/native/options.c").read_text()
    known = set(re.findall(r'\{"((?:no-)?container-[a-z-]+)"', source))
    assert set(CONTAINER_OPTION.findall((ROOT / "docs/containers.md").read_text())) == known


@every_page
def test_every_file_of_the_repository_on_a_page_exists(page: Path):
    named = {path for span in SPAN.findall(FENCE.sub("", page.read_text())) for path in PATH.findall(span)[:1]}
    assert sorted(path for path in named if not (ROOT / path).exists()) == []
