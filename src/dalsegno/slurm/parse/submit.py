"""`sbatch --parsable`: the id of the job just handed in."""

from __future__ import annotations

from dalsegno.slurm.parse.text import malformed, optional_integer


def parse_submitted(text: str) -> int:
    """`12` or `12;cluster`, on the last line: a submit plugin may have talked before."""
    last = text.strip().splitlines()[-1] if text.strip() else ""
    job_id = optional_integer(last.partition(";")[0])
    if job_id is None:
        raise malformed("sbatch --parsable", text)
    return job_id
