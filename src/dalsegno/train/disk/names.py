"""What lies where in a folder of checkpoints: names out, names in; nothing is touched.

step-000000001234/               a checkpoint: __0_0.distcp, __1_0.distcp … .metadata, MANIFEST.json
latest                           a link to the newest one
.step-000000001240.RUN.g3.tmp/   one that is being written
.trash-step-000000001000.…/      one that is being removed
.dalsegno.lock                   held by the run that writes here
before-20260131-235959/          what `--fresh` has set aside
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote, unquote

MANIFEST = "MANIFEST.json"
METADATA = ".metadata"
LATEST = "latest"
LOCK = ".dalsegno.lock"
ASIDE = "before-"
SHELL = "dalsegno.shell"  # entries of ours among those of torch

_STEP = re.compile(r"step-(\d{12,})")
_TEMPORARY = re.compile(r"\.step-(\d{12,})\.(.*)\.g(\d+)\.tmp")
_TRASH = re.compile(r"\.trash-step-\d{12,}\..+")


class Temporary(NamedTuple):
    """A checkpoint that is being written: of which step, by which run, in which generation of it."""

    step: int
    run: str
    generation: int

    @property
    def name(self) -> str:
        return f".{step_name(self.step)}.{quote(self.run, safe='')}.g{self.generation}.tmp"


def numbered(run: str, number: int) -> str:
    """What a process's second checkpointer, and so on, writes bears a name of its own."""
    return f"{run}.{number}" if number else run


def is_of(name: str, run: str) -> bool:
    """Whether one of the run's checkpointers goes by this name."""
    return name == run or re.fullmatch(re.escape(run) + r"\.\d+", name) is not None


def step_name(step: int) -> str:
    return f"step-{step:012d}"


def parse_step(name: str) -> int | None:
    """The step of a checkpoint's folder; None for any other name, one like it included (`step-5`, `step-…-copy`)."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and step_name(int(found[1])) == name else None


def parse_temporary(name: str) -> Temporary | None:
    found = _TEMPORARY.fullmatch(name)
    return Temporary(int(found[1]), unquote(found[2]), int(found[3])) if found else None


def trash_name(step: int, unique: str) -> str:
    return f".trash-{step_name(step)}.{unique}"


def is_trash(name: str) -> bool:
    return _TRASH.fullmatch(name) is not None


def data_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def part_name(rank: int) -> str:
    return f"part-{rank}.json"


def failed_name(rank: int) -> str:
    """Left in place of the part by a rank that could not write its share."""
    return f"failed-{rank}.txt"


def own_key(rank: int) -> str:
    return f"dalsegno.own.{rank}"
