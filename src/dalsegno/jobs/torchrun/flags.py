"""A torchrun command line, read as torchrun reads it: flags, script, and the script's own arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dalsegno.errors import UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.jobs.torchrun.args import TorchrunArgs
from dalsegno.jobs.torchrun.table import FLAGS, Flag
from dalsegno.jobs.values import shown


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
    parser = _Parser(prog="dalsegno torchrun", add_help=False)
    parser.add_argument("-h", "--help", action=_Help, dest=argparse.SUPPRESS)
    for flag in FLAGS:
        _add(parser, flag, next((environ[name] for name in flag.variables if name in environ), None))
    parser.add_argument("training_script", type=str)
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def _add(parser: argparse.ArgumentParser, flag: Flag, variable: str | None) -> None:
    """argparse reads a default that is text like an argument, so a variable needs no parsing of its own."""
    if flag.switch:
        parser.add_argument(*flag.spellings, action="store_true", default=_switched(flag, variable or "0"))
    else:
        default = flag.default if variable is None else variable
        parser.add_argument(*flag.spellings, type=flag.type, default=default, choices=flag.choices or None)


def _switched(flag: Flag, variable: str) -> bool:
    if not variable.strip().isdigit():
        raise UsageError(f"{shown(variable)} is neither 1 nor 0", where=flag.variables[0], hint="write `1` or `0`")
    return bool(int(variable))


class _HelpWanted(Exception):
    pass


class _Help(argparse.Action):
    """Help ends the reading at once, before the script is missed."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0)

    def __call__(self, *_: Any) -> NoReturn:
        raise _HelpWanted


class _Parser(argparse.ArgumentParser):
    """One that tells its faults by raising."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"torchrun would not take this: {message}", hint=_hint(message))


def _hint(message: str) -> str:
    if "training_script" in message:
        return "name the script after the flags: `dalsegno torchrun --nproc-per-node 8 train.py --lr 0.1`"
    unknown = message.partition("unrecognized arguments: ")[2].split()
    known = [name for flag in FLAGS for name in flag.spellings]
    otherwise = "`dalsegno torchrun --help` shows all flags"
    return did_you_mean(unknown[0].partition("=")[0], known, otherwise) if unknown else otherwise
