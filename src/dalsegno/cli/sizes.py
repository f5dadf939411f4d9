"""Sizes in words."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes as people read them: 512 B, 3.2 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
