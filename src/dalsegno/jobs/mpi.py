"""How srun and an MPI library find each other: one of the types that `srun --mpi=list` prints."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dalsegno.errors import UsageError

MPI_LIST_ARGV = ("srun", "--mpi=list")
_WORD = re.compile(r"\b(none|openmpi|cray_shasta|pmi2|pmix(?:_v\d+)?)\b")


def parse_mpi_types(text: str) -> tuple[str, ...]:
    """The types in that list, whichever of Slurm's layouts it has; older ones print it to stderr."""
    listed = (_WORD.findall(line.partition("versions available:")[2] or line) for line in text.splitlines())
    return tuple(dict.fromkeys(name for names in listed for name in names))


def choose_mpi(types: Sequence[str]) -> str:
    """PMIx, the newest there is, else PMI-2. Open MPI 5 and most others know nothing else."""
    if "pmix" in types:
        return "pmix"
    versions = sorted((name for name in types if name.startswith("pmix_v")), key=lambda name: int(name[6:]))
    if versions:
        return versions[-1]
    if "pmi2" in types:
        return "pmi2"
    known = f"`srun --mpi=list` knows only {', '.join(types)}" if types else "`srun --mpi=list` names no type"
    raise UsageError(f"this Slurm cannot start MPI programs: {known}", hint="it needs its pmix or pmi2 plugin")
