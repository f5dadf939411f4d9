"""`dalsegno run`: run training that survives lost nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import click

from dalsegno.cli import out
from dalsegno.cli.training.submission import hand_over
from dalsegno.errors import UsageError
from dalsegno.runs.submit.options import OPTIONS, Option, ValueKind, parse_option
from dalsegno.runs.submit.request import check_sbatch_args
from dalsegno.runs.submit.values import parse_env_pairs

_Command = TypeVar("_Command", bound=Callable[..., object])
ONE_WORD = "sbatch_arg"  # the value of this option is taken unchanged; that of `sbatch_args` is split as in a shell

# `--nproc_per_node` also works, as with torchrun. Everything after the script belongs to the script.
RUN_SETTINGS: Mapping[str, Any] = {
    "token_normalize_func": lambda word: word.replace("_", "-"),
    "allow_interspersed_args": False,
}


def run_options(command: _Command) -> _Command:
    """Add all options of a run to a command that takes them as `**given`."""
    one_word = click.option(
        "--sbatch-arg",
        ONE_WORD,
        multiple=True,
        metavar="OPTION",
        help="Further option for Slurm, passed unchanged: --sbatch-arg=--nice=10. May be repeated.",
    )
    for add in [one_word, *(click_option(each) for each in reversed(OPTIONS))]:
        command = add(command)
    return command


# Options that decide where a run runs, and that scripts rarely have. If one of them follows the script, it is probably
# misplaced.
_ABOUT_THE_RUN = frozenset(
    {"nodes", "nproc_per_node", "gpus_per_node", "cpus_per_task", "spares", "partition", "venv", "conda", "no_preload"}
    | {"container_image", "detach", "nodelist", "exclude"}
)


def find_misplaced(args: Iterable[str]) -> list[str]:
    """Return the options of _ABOUT_THE_RUN among the script's arguments. Stop at a `--`."""
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


def read_fields(given: Mapping[str, Any]) -> dict[str, object]:
    """Return the request fields that were given on the command line."""
    fields = {each.target: _read(each, given[each.word]) for each in OPTIONS if given[each.word] not in (None, ())}
    words = given[ONE_WORD]
    if words:
        _named("--sbatch-arg", lambda: check_sbatch_args(words))
        fields["sbatch_args"] = (*_words(fields.get("sbatch_args", ())), *words)
    return fields


def click_option(each: Option) -> Callable[[_Command], _Command]:
    """Return the decorator that adds an option of a run to a command."""
    shorts = [spelling for spelling in each.also if not spelling.startswith("--")]
    longs = [spelling for spelling in each.also if spelling.startswith("--")]
    how: dict[str, Any] = {"is_flag": True, "default": None} if each.kind is ValueKind.FLAG else {"metavar": each.shows}
    several = each.kind in (ValueKind.LIST, ValueKind.MAPPING)
    text = f"{each.help} May be repeated." if several else each.help
    return click.option(*shorts, each.flag, *longs, each.word, multiple=several, help=text, **how)


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


@click.command(context_settings=dict(RUN_SETTINGS))
@run_options
@click.option(
    "--cluster", "-M", metavar="NAME", help="Cluster to use. Default: the cluster of this shell, or the only one."
)
@click.option("--dry-run", is_flag=True, help="Print the Slurm commands without running them.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, args: tuple[str, ...], cluster: str | None, dry_run: bool, **given: Any) -> None:
    """Run SCRIPT with ARGS on the cluster's nodes and follow it to its end. Exits with the run's exit code.

    A lost node is replaced and the run resumes. Ctrl-C asks whether to detach from the run or to cancel it.
    Put options before SCRIPT, or set them as variables: DALSEGNO_RUN_NODES=4.

    \b
    dalsegno run --nodes 4 --gpus-per-node 8 train.py --lr 1e-4
    dalsegno run -N 2:4 --spares 1 -t 2-00:00:00 --detach train.py
    dalsegno run --nodes 2 --framework mpi ./solver
    """
    import os

    from dalsegno.runs.submit.options import make_request, options_from_env

    if late := find_misplaced(args):
        words = " and ".join(f"`{word}`" for word in late)
        out.warn(f"{words} after {script} is passed to the script, not to `dalsegno run`")
        out.advise(f"put options for `dalsegno run` before the script: `dalsegno run {late[0]} … {script}`")
    request = make_request(script, args, options_from_env(os.environ), read_fields(given))
    raise SystemExit(hand_over(request, cluster, dry_run))
