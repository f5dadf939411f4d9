"""What a run that is not complete waits for, in one line. Pure."""

from __future__ import annotations

from collections.abc import Collection

from dalsegno.launch.group import in_order

NAMED = 3  # more are only counted


def shortage(missing: int, coming: Collection[str], waits: bool, refused: str) -> str:
    """`coming` are nodes that will be ready, `waits` and `refused` tell of the others; "" where nothing is to say."""
    beyond = missing - len(coming)
    more = f"{beyond} more node{'s' if beyond > 1 else ''}"
    if beyond > 0 and refused:
        return f"needs {more}, and Slurm has none to give: {refused}"
    if beyond > 0:
        return f"waits for {more} from Slurm" if waits else ""
    if missing <= 0 or not coming:
        return ""
    names = sorted(coming, key=in_order)
    return f"waits for {', '.join(names) if len(names) <= NAMED else f'{len(names)} nodes'} to be ready"
