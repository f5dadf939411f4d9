"""The batch script of a run whose coordinator has no head node to live on."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.jobs.job_ask import slurm_options
from dalsegno.jobs.plan import RunPlan, salloc_argv
from dalsegno.jobs.steps import coordinator_argv, step_argv
from dalsegno.launch.folder import RunFolder

# Every line of a script that starts so may be an option to sbatch, so nothing of a user's may come before them.
_MARK = "#SBATCH"
_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@%+&|*()!~^\[\]-]*", re.ASCII)
# sbatch blanks these two words out wherever they stand in a line.
_BLANKED = re.compile(r"(het|pack)(job)", re.IGNORECASE)


def render_sbatch(plan: RunPlan) -> str:
    """The script for `sbatch`."""
    lines = ["#!/bin/bash", f"# Run {plan.run}, by Dal Segno. `dalsegno runs` tells how it fares."]
    options = [*slurm_options(plan.job), *_batch_options(plan)]
    lines += [f"{_MARK} {sbatch_word(option)}" for option in options]
    lines += ["", f"exec {shlex.join(coordinator_argv(plan))}"]
    return "\n".join(lines) + "\n"


def render_commands(plan: RunPlan) -> str:
    """What `--dry-run` shows: how the job is asked for, and the step in it."""
    srun, *rest = step_argv(plan)
    if plan.on_head:
        return f"{shlex.join(salloc_argv(plan))}\n{shlex.join([srun, '--jobid=JOB', *rest])}\n"
    return f"{render_sbatch(plan)}\n# The coordinator starts in it:\n# {shlex.join([srun, *rest])}\n"


def _batch_options(plan: RunPlan) -> list[str]:
    folder = RunFolder(Path(plan.folder.replace("%", "%%")))
    return [
        "--no-kill",
        "--requeue",  # preempted, it waits in the queue and goes on
        "--open-mode=append",  # and keeps what it has said so far
        f"--output={folder.job_log}",
        *([f"--chdir={plan.request.chdir}"] if plan.request.chdir else []),
    ]


def sbatch_word(word: str) -> str:
    """One word of a #SBATCH line. sbatch's own reader knows quotes, but inside them `\\` still escapes."""
    if _PLAIN.fullmatch(word) and not _BLANKED.search(word):
        return word
    if not word.isprintable():
        what = f"{word!r:.60} cannot stand in a batch script"
        raise DalsegnoError(what, hint="a path or value with a line break or another control character: leave that out")
    escaped = re.sub(r'(["\\#])', r"\\\1", word)
    return '"' + _BLANKED.sub(r"\1\\\2", escaped) + '"'
