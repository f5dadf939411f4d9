"""Find the output files of a job: expand the patterns in their names, such as `%j`, as slurmd does. Pure."""

from __future__ import annotations

import os
import re
from dataclasses import replace

from dalsegno.slurm.facts import JobInfo

_PATTERN = re.compile(r"%(?P<width>\d{0,2})(?P<letter>[AabJjNnstux%])")
_MAX_WIDTH = 10  # Slurm's limit for the width in a pattern such as `%4j`
_NO_TASK = 4294967294  # what Slurm inserts for `%a` if the job is not a task of an array


def with_output_files(job: JobInfo) -> JobInfo:
    """Return the job with the full paths of its output files. A job of srun or salloc has none unless it names one."""
    default = "slurm-%A_%a.out" if job.array_id is not None else "slurm-%j.out"
    output = job.stdout or (default if job.batch else "")
    return replace(job, stdout=_full_path(job, output), stderr=_full_path(job, job.stderr or output))


def _full_path(job: JobInfo, name: str) -> str:
    return os.path.join(job.work_dir or "/", expand_name(job, name)) if name else ""


def expand_name(job: JobInfo, name: str) -> str:
    """Return a file name of `--output` with its patterns replaced.

    As in Slurm, a name with a backslash only loses its backslashes, and its patterns stay.
    """
    if "\\" in name:
        return re.sub(r"\\(.?)", r"\1", name)
    task = int(job.array_task) if job.array_task.isdecimal() else _NO_TASK
    numbers = {"A": job.array_id or job.id, "a": task, "b": task % 10, "J": job.id, "j": job.id, "n": 0, "t": 0}
    node = job.batch_host or next(iter(job.nodes), "")
    texts = {"N": node.partition(".")[0], "s": "batch", "u": job.user, "x": job.name, "%": "%"}

    def value(found: re.Match[str]) -> str:
        letter = found["letter"]
        if letter in texts:
            return texts[letter]
        return str(numbers[letter]).zfill(min(int(found["width"] or 0), _MAX_WIDTH))

    return _PATTERN.sub(value, name)
