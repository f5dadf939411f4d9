"""`dalsegno run`: training that survives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import click

from dalsegno.cli import out
from dalsegno.cli.submission import hand_over
from dalsegno.errors import UsageError
from dalsegno.runs.submit.options import OPTIONS, Option, ValueKind, parse_option
from dalsegno.runs.submit.request import check_sbatch_args
from dalsegno.runs.submit.values import parse_env_pairs

# ---- The options of a run on the command line, made from the one table of them.


_Command = TypeVar("_Command", bound=Callable[..., object])
_ONE_WORD = "sbatch_arg"  # beside `sbatch_args`, whose value is split as a shell would

# `--nproc_per_node` is `--nproc-per-node`, as torchrun has it; and what follows the script is the script's.
RUN_SETTINGS: Mapping[str, Any] = {
    "token_normalize_func": lambda word: word.replace("_", "-"),
    "allow_interspersed_args": False,
}


def run_options(command: _Command) -> _Command:
    """All options that a run has, for a command that takes them as `**given`."""
    one_word = click.option(
        "--sbatch-arg",
        _ONE_WORD,
        multiple=True,
        metavar="OPTION",
        help="One further option for Slurm: --sbatch-arg=--nice=10. May be given again.",
    )
    for add in [one_word, *(_click_option(each) for each in reversed(OPTIONS))]:
        command = add(command)
    return command


# What a script seldom has itself, and what changes where a run runs: after the script, it was most likely meant for us.
_ABOUT_THE_RUN = frozenset(
    {"nodes", "nproc_per_node", "gpus_per_node", "cpus_per_task", "spares", "partition", "venv", "conda", "no_preload"}
    | {"container_image", "detach", "nodelist", "exclude"}
)


def misplaced(args: Iterable[str]) -> list[str]:
    """The options of ours among the script's own arguments; what follows a `--` is meant for the script."""
    ours = {
        spelling: each.flag
        for each in OPTIONS
        if each.word in _ABOUT_THE_RUN
        for spelling in (each.flag, *(also for also in each.also if also.startswith("--") or also == "-N"))
    }
    found = []
    for word in args:
        if word == "--":
            break
        name = word.partition("=")[0]
        found += [name] if name.replace("_", "-") in ours and name not in found else []
    return found


def fields_given(given: Mapping[str, Any]) -> dict[str, object]:
    """Fields of a request from what click found; what was not given is not in it."""
    fields = {each.target: _read(each, given[each.word]) for each in OPTIONS if given[each.word] not in (None, ())}
    words = given[_ONE_WORD]
    if words:
        _named("--sbatch-arg", lambda: check_sbatch_args(words))
        fields["sbatch_args"] = (*_words(fields.get("sbatch_args", ())), *words)
    return fields


def _click_option(each: Option) -> Callable[[_Command], _Command]:
    shorts = [spelling for spelling in each.also if not spelling.startswith("--")]
    longs = [spelling for spelling in each.also if spelling.startswith("--")]
    how: dict[str, Any] = {"is_flag": True, "default": None} if each.kind is ValueKind.FLAG else {"metavar": each.shows}
    several = each.kind in (ValueKind.LIST, ValueKind.MAPPING)
    said = f"{each.help} May be given again." if several else each.help
    return click.option(*shorts, each.flag, *longs, each.word, multiple=several, help=said, **how)


def _read(each: Option, value: Any) -> object:
    if each.kind is ValueKind.FLAG:
        return bool(value)
    if each.kind is ValueKind.MAPPING:
        return _named(each.flag, lambda: parse_env_pairs(value))
    if each.kind is ValueKind.LIST:
        return tuple(word for text in value for word in _words(parse_option(each.word, text)))
    return parse_option(each.word, value)


def _words(value: object) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, Iterable) else ()


_Value = TypeVar("_Value")


def _named(flag: str, read: Callable[[], _Value]) -> _Value:
    try:
        return read()
    except UsageError as fault:
        raise UsageError(fault.what, where=flag, hint=fault.hint) from None


# ---- `dalsegno run`: training that survives.


@click.command(context_settings=dict(RUN_SETTINGS))
@run_options
@click.option("--cluster", "-M", metavar="NAME", help="Which cluster; else the one this shell is on, or the only one.")
@click.option("--dry-run", is_flag=True, help="Print what Slurm would be asked for, and ask for nothing.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, args: tuple[str, ...], cluster: str | None, dry_run: bool, **given: Any) -> None:
    """Run SCRIPT with its ARGS on the cluster's nodes, and follow it to its end. The exit code is the run's own.

    A node that is lost is replaced and the run goes on. Ctrl-C asks whether to leave the run or to end it.
    Options stand before SCRIPT; each may also be a variable: DALSEGNO_RUN_NODES=4.

    \b
    dalsegno run --nodes 4 --gpus-per-node 8 train.py --lr 1e-4
    dalsegno run -N 2:4 --spares 1 -t 2-00:00:00 --detach train.py
    dalsegno run --nodes 2 --framework mpi ./solver
    """
    import os

    from dalsegno.runs.submit.options import make_request, options_from_env

    if late := misplaced(args):
        words = " and ".join(f"`{word}`" for word in late)
        out.warn(f"{words} after {script} goes to the script, not to `dalsegno run`")
        out.advise(f"put options for `dalsegno run` before the script: `dalsegno run {late[0]} … {script}`")
    request = make_request(script, args, options_from_env(os.environ), fields_given(given))
    raise SystemExit(hand_over(request, cluster, dry_run))
