"""What srun notes of the step that it starts: `JOB STEP NODES`. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.hostlist import expand

NOTES = "DALSEGNO_RESUME_NOTES"  # the descriptor on which to note; our Slurm plugin keeps it from the tasks


@dataclass(frozen=True)
class Step:
    job: int
    id: int
    nodes: tuple[str, ...]


def read_notes(text: str) -> Step | None:
    """The step; None where there was none, and for one across several jobs (a heterogeneous one)."""
    words = [line.split(" ") for line in text.splitlines()]
    if len(words) != 1 or len(words[0]) != 3 or not all(word.isdigit() for word in words[0][:2]):
        return None
    return Step(int(words[0][0]), int(words[0][1]), tuple(expand(words[0][2])))
