"""What squeue, sacct and `scontrol show job` spell alike."""

from __future__ import annotations

from dalsegno.hostlist import HostlistError, expand
from dalsegno.slurm.parse.text import known, malformed, optional_integer


def node_names(command: str, text: str) -> tuple[str, ...]:
    """The nodes of a job; none while it waits, when sacct says `None assigned`."""
    if not known(text) or text.strip() == "None assigned":
        return ()
    try:
        return tuple(expand(text))
    except HostlistError as error:
        raise malformed(command, text) from error


def array_task(text: str) -> str:
    """`3` or `4-9%2`; nothing for a job that is no array."""
    return known(text)


def unix_status(text: str) -> tuple[int, int]:
    """squeue of 22.05 writes the status as wait(2) gives it: 768 is exit code 3, 9 is signal 9. Later ones: `3:0`."""
    if ":" in text:
        return colon_status(text)
    status = optional_integer(text) or 0
    return (status >> 8) & 0xFF, status & 0x7F


def colon_status(text: str) -> tuple[int, int]:
    """Everyone else writes `code:signal`."""
    code, _, signal = text.partition(":")
    return optional_integer(code) or 0, optional_integer(signal) or 0
