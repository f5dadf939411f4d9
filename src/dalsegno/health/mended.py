"""When the GPUs were last reset: what the kernel's log told before counts no more. A reboot needs no such word."""

from __future__ import annotations

from pathlib import Path

from dalsegno.errors import UsageError
from dalsegno.health.world import World
from dalsegno.system.apart import NoAnswer
from dalsegno.system.files import make_folder, write_atomic

MARK = "/run/dalsegno-health/mended"  # root's, and gone after a boot


def note_mended(now: float, uid: int, mark: str = MARK) -> None:
    if uid != 0:
        raise UsageError("only root can say that a machine is mended", hint="use sudo")
    make_folder(Path(mark).parent, 0o700)
    write_atomic(Path(mark), f"{now:.3f}\n", 0o600)


def mended_at(world: World) -> float:
    """0 where nobody has said so."""
    try:
        return max(float(world.read(MARK)), world.seen.since)
    except (NoAnswer, ValueError):
        return world.seen.since
