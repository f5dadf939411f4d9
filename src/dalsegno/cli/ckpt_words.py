"""What `dalsegno ckpt` says of a checkpoint."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.cli.sizes import size

if TYPE_CHECKING:
    from dalsegno.train.disk.verify import Checked

HEADERS = ["STEP", "AGE", "SIZE", "RANKS", "RUN", "STATE"]


def row(checked: Checked) -> list[str]:
    manifest = checked.manifest
    if manifest is None:
        return [checked.path.name, "-", "-", "-", "-", _state(checked)]
    return [
        str(manifest.step),
        _age(manifest.time),
        size(manifest.bytes),
        str(manifest.world),
        manifest.run,
        _state(checked),
    ]


def _state(checked: Checked) -> str:
    if checked.faults:
        return f"damaged: {'; '.join(checked.faults)}"
    return "whole, latest" if _is_latest(checked.path) else "whole"


def verdict(checked: Checked) -> str:
    if checked.faults or checked.manifest is None:
        return f"{checked.path}: damaged: {'; '.join(checked.faults)}"
    return f"{checked.path}: whole, {len(checked.manifest.files) + 1} files, {size(checked.manifest.bytes)}"


def as_json(checked: Checked) -> dict[str, object]:
    manifest = checked.manifest
    return {
        "path": str(checked.path),
        "whole": not checked.faults,
        "faults": list(checked.faults),
        "latest": _is_latest(checked.path),
        "step": manifest.step if manifest else None,
        "time": manifest.time if manifest else None,
        "bytes": manifest.bytes if manifest else None,
        "world": manifest.world if manifest else None,
        "run": manifest.run if manifest else None,
        "generation": manifest.generation if manifest else None,
        "torch": manifest.torch if manifest else None,
    }


def _is_latest(path: Path) -> bool:
    try:
        return os.readlink(path.parent / "latest") == path.name
    except OSError:
        return False


def _age(time: str) -> str:
    try:
        seconds = (datetime.now(timezone.utc) - datetime.fromisoformat(time)).total_seconds()
    except (ValueError, TypeError):
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
