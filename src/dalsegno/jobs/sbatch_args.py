"""Options handed on to Slurm as they are, and those that are not because we speak for them ourselves."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dalsegno.errors import UsageError
from dalsegno.jobs.values import shown

_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(=.*)?", re.ASCII)

# Slurm's options that we write, and ours that steers each ("" where none does).
_OURS = {
    "nodes": "--nodes",
    "ntasks": "--nproc-per-node",
    "ntasks-per-node": "--nproc-per-node",
    "cpus-per-task": "--cpus-per-task",
    "gpus-per-node": "--gpus-per-node",
    "mem": "--mem",
    "time": "--time",
    "partition": "--partition",
    "account": "--account",
    "qos": "--qos",
    "constraint": "--constraint",
    "exclude": "--exclude",
    "job-name": "--name",
    "signal": "--signal-lead",
    "chdir": "--chdir",
    "output": "--output",
    "error": "--output",
    "export": "--env",
    "comment": "",
    "dependency": "",
    "no-kill": "",
    "no-shell": "",
    "open-mode": "",
    "wrap": "",
    "array": "",
    "parsable": "",
    "test-only": "",
    "wait": "",
    "input": "",
}
# What sbatch has and salloc has not (22.05 to 24.11).
_BATCH_ONLY = frozenset(
    {"batch", "export-file", "ignore-pbs", "kill-on-invalid-dep", "no-requeue", "propagate", "requeue"}
)


def check_sbatch_args(words: Iterable[str]) -> None:
    """Each must be one long option in one word. Anything else sbatch would take for the script."""
    for each in words:
        name = _name(each)
        if name in _OURS:
            instead = _OURS[name]
            raise UsageError(
                f"`--{name}` is ours to write", hint=f"use our own `{instead}`" if instead else "leave it out"
            )


def check_for_salloc(words: Iterable[str]) -> None:
    """On a cluster with a controller the run holds an allocation without a batch script."""
    for each in words:
        if _name(each) in _BATCH_ONLY:
            hint = "this cluster's runs hold an allocation, not a batch job; leave it out"
            raise UsageError(f"`--{_name(each)}` is for batch jobs only", hint=hint)


def _name(each: str) -> str:
    found = _OPTION.fullmatch(each)
    if not found or not each.isprintable():
        hint = "write `--sbatch-arg=--reservation=morning`"
        raise UsageError(f"{shown(each)} is not one of Slurm's long options", hint=hint)
    return found[1]
