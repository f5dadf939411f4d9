"""A torchrun command line, read as torchrun reads it: flags, script, and the script's own arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dalsegno.errors import UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.jobs.torchrun.args import TorchrunArgs
from dalsegno.jobs.torchrun.flag_help import ABOUT, HELP, Formatter, said_of
from dalsegno.jobs.torchrun.table import FLAGS, Flag
from dalsegno.jobs.values import shown

_SCRIPT = "SCRIPT"


def parse_torchrun(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> TorchrunArgs | None:
    """The command line after `torchrun`; None if it asks for help. UsageError where torchrun would refuse it.

    Flags end at the script; what follows is the script's own, however it looks.
    """
    try:
        found: dict[str, Any] = vars(torchrun_parser(environ or {}).parse_args(list(argv)))
    except _HelpWanted:
        return None
    lists: dict[str, Any] = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
    return TorchrunArgs(**{**found, **lists})


def torchrun_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """argparse's, as torchrun's own is: so abbreviations, and the split at the script, are the same."""
    usage = "dalsegno torchrun [OPTIONS] SCRIPT [ARGS]..."
    parser = _Parser("dalsegno torchrun", usage, ABOUT, add_help=False, formatter_class=Formatter)
    parser.add_argument("-h", "--help", action=_Help, dest=argparse.SUPPRESS, help="Show this message and exit.")
    for flag in FLAGS:
        _add(parser, flag, next((environ[name] for name in flag.variables if name in environ), None))
    parser.add_argument("training_script", type=str, metavar=_SCRIPT, help="What to run on every node.")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, metavar="ARGS", help="Its own arguments.")
    return parser


def _add(parser: argparse.ArgumentParser, flag: Flag, variable: str | None) -> None:
    """argparse reads a default that is text like an argument, so a variable needs no parsing of its own."""
    said = said_of(flag.name, flag.default)
    if flag.switch:
        parser.add_argument(*flag.spellings, action="store_true", default=_switched(flag, variable or "0"), help=said)
    else:
        how: dict[str, Any] = {"type": flag.type, "default": flag.default if variable is None else variable}
        shows = HELP[flag.name][0] or None
        parser.add_argument(*flag.spellings, choices=flag.choices or None, metavar=shows, help=said, **how)


def _switched(flag: Flag, variable: str) -> bool:
    if not variable.strip().isdigit():
        raise UsageError(f"{shown(variable)} is neither 1 nor 0", where=flag.variables[0], hint="write `1` or `0`")
    return bool(int(variable))


class _HelpWanted(Exception):
    pass


class _Help(argparse.Action):
    """Help ends the reading at once, before the script is missed."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, *_: Any) -> NoReturn:
        raise _HelpWanted


class _Parser(argparse.ArgumentParser):
    """One that tells its faults by raising."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"torchrun would not take this: {message}", hint=_hint(message))


def _hint(message: str) -> str:
    if f"required: {_SCRIPT}" in message:
        return "name the script after the flags: `dalsegno torchrun --nproc-per-node 8 train.py --lr 0.1`"
    unknown = message.partition("unrecognized arguments: ")[2].split()
    known = [name for flag in FLAGS for name in flag.spellings]
    otherwise = "`dalsegno torchrun --help` shows all flags"
    return did_you_mean(unknown[0].partition("=")[0], known, otherwise) if unknown else otherwise
