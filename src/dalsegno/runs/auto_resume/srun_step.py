"""The step that srun starts: what our Slurm plugin notes about it, and messages to the user."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from dalsegno.hostlist import expand

# Environment variable with the number of the file descriptor for notes. In srun, our Slurm plugin writes a line
# `JOB STEP NODES` to it for the step that srun starts, and removes the variable, so that tasks do not see it.
NOTES = "DALSEGNO_RESUME_NOTES"


@dataclass(frozen=True)
class SrunStep:
    job: int
    id: int
    nodes: tuple[str, ...]


def read_notes(text: str) -> SrunStep | None:
    """Return the step in srun's notes; None if there is none, or if it spans several jobs (a heterogeneous job)."""
    fields = [line.split(" ") for line in text.splitlines()]
    if len(fields) != 1 or len(fields[0]) != 3 or not all(word.isdigit() for word in fields[0][:2]):
        return None
    return SrunStep(int(fields[0][0]), int(fields[0][1]), tuple(expand(fields[0][2])))


def report(text: str) -> None:
    print(f"dalsegno: auto-resume: {text}", file=sys.stderr, flush=True)
