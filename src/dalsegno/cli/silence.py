"""A Slurm that does not answer, told from one that says no."""

from __future__ import annotations

from dalsegno.errors import CommandFailed

_SIGNS = ("no answer within", "Unable to contact slurm controller", "Zero Bytes were transmitted", "connect failure")


def is_silence(fault: CommandFailed) -> bool:
    return any(sign in fault.stderr for sign in _SIGNS)
