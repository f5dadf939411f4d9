"""Words that may go into a command line or a script, each by itself. Every check raises UsageError or does nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.jobs.values import UNLIMITED_S, shown
from dalsegno.launch.liveness import LEAST_GONE_S, MOST_GONE_S
from dalsegno.slurm.names import node_list, word

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+=:-]{0,79}", re.ASCII)
_CONSTRAINT = re.compile(r"[A-Za-z0-9\[(!][A-Za-z0-9_.,:&|*!()\[\]=-]{0,199}", re.ASCII)
_MAX_SIGNAL_LEAD_S = 65_535
MOST_ARGUMENT_BYTES = 512 << 10  # as JSON: half of what a message may have


def check_name(name: str) -> None:
    """The name of a run, or its id: it becomes the name of Slurm's job."""
    if not _NAME.fullmatch(name):
        hint = "use letters, digits and `._@+=:-`, starting with a letter or digit, at most 80"
        raise UsageError(f"{shown(name)} cannot be a run's name", hint=hint)


def check_slurm_names(names: Mapping[str, str]) -> None:
    """Names of Slurm's own things, by their kind; "" is none, and several may stand with commas."""
    try:
        for kind, given in names.items():
            for name in given.split(",") if given else ():
                word(kind, name)
    except DalsegnoError as fault:
        raise UsageError(fault.what, hint="`sinfo` and `sacctmgr show associations` list the names") from None


def check_node_names(names: Iterable[str]) -> None:
    try:
        for name in names:
            node_list(name)
    except DalsegnoError as fault:
        raise UsageError(fault.what, hint="`sinfo -N` lists the nodes") from None


def check_constraint(text: str) -> None:
    if not _CONSTRAINT.fullmatch(text):
        hint = "write features with Slurm's `&`, `|`, `*` and brackets, without blanks: `a100&nvlink`"
        raise UsageError(f"{shown(text)} cannot be a constraint", hint=hint)


def check_arguments(words: Iterable[str]) -> None:
    """What a process gets as its arguments or in its environment may hold anything else."""
    for each in words:
        if "\0" in each:
            raise UsageError(f"{shown(each)} holds a zero byte", hint="remove it")


def check_size(arguments: Sequence[str]) -> None:
    """Refuse arguments that would not fit into the message that tells agents what to start."""
    size = len(json.dumps(list(arguments)))
    if size > MOST_ARGUMENT_BYTES:
        what = f"the arguments of the script take {size >> 10} KiB, and at most {MOST_ARGUMENT_BYTES >> 10} KiB fit"
        raise UsageError(what, hint="write them to a file, and give the script its path")


def check_paths(paths: Iterable[str]) -> None:
    for path in paths:
        if not path.isprintable() or path.startswith("-"):
            raise UsageError(f"{shown(path)} is not a path Slurm can take", hint="use one without line breaks")


def check_counts(counts: Mapping[str, int | None], least: int) -> None:
    for name, count in counts.items():
        if count is not None and count < least:
            raise UsageError(f"`--{name}` cannot be {count}", hint=f"the least is {least}")


def check_node_timeout(seconds: float | None) -> None:
    """Heartbeats come ten times a second, and some get lost: below a second every hiccup would be a lost node."""
    if seconds is not None and not LEAST_GONE_S <= seconds <= MOST_GONE_S:
        hint = f"from {LEAST_GONE_S:g} to {MOST_GONE_S:g} seconds"
        raise UsageError(f"a node cannot be given up after {seconds:g} s", hint=hint)


def check_signal(lead_s: int, limit_s: int | None) -> None:
    """The signal before the end must fall inside the job."""
    if not 0 < lead_s <= _MAX_SIGNAL_LEAD_S:
        hint = f"from 1 to {_MAX_SIGNAL_LEAD_S} seconds"
        raise UsageError(f"Slurm cannot send a signal {lead_s} s before the end", hint=hint)
    if limit_s is not None and limit_s != UNLIMITED_S and limit_s <= lead_s:
        hint = "ask for more time, or for a smaller `--signal-lead`"
        raise UsageError(f"a limit of {limit_s} s leaves no time before its signal, {lead_s} s ahead", hint=hint)
