"""What the judges of GPUs have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dalsegno.health.facts import GpuFacts
from dalsegno.system.apart import NoAnswer


def telling(gpus: Sequence[GpuFacts], field: str, what: str) -> list[GpuFacts]:
    """Those that tell of it. None of them is no good news: NoAnswer."""
    found = [gpu for gpu in gpus if getattr(gpu, field) is not None]
    if not found:
        raise NoAnswer(f"no GPU tells {what}")
    return found


def which(gpus: Iterable[GpuFacts]) -> str:
    """`GPU 3 (1653724066759)`: the number changes with the machine, the serial number is on the card."""
    return ", ".join(f"GPU {gpu.index}" + (f" ({gpu.serial})" if gpu.serial else "") for gpu in gpus)
