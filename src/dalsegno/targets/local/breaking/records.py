"""What was injected into a node and lasts: a small file each, written before the fault begins."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dalsegno.errors import DalsegnoError
from dalsegno.health.result import Remedy
from dalsegno.system.children import Process
from dalsegno.system.files import make_folder, read_json, read_text, write_atomic
from dalsegno.targets.local.folder import Folder

HISTORY = "history"  # beside what lasts: what was ever injected, a line each


@dataclass(frozen=True)
class Injected:
    """`mark` tells it from a later one of the same name; `undo` is what has to be known to undo it."""

    fault: str
    node: str
    at: float
    mark: str
    options: Mapping[str, Any] = field(default_factory=dict)
    undo: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mended_by(self) -> Remedy:
        return Remedy(self.options.get("mended_by", Remedy.REBOOT.value))


def note(
    folder: Folder, fault: str, node: str, options: Mapping[str, Any], undo: Mapping[str, Any] | None = None
) -> Injected:
    """Write down what is about to be done; one of the same name that is there already has another mark."""
    injected = Injected(fault, node, time.time(), secrets.token_hex(8), options, undo or {})
    make_folder(folder.faults(node))
    write_atomic(_path(folder, node, fault), json.dumps(asdict(injected)))
    return injected


def forget(folder: Folder, injected: Injected) -> None:
    """Gone already, or a newer one in its place, is fine."""
    if is_current(folder, injected):
        with contextlib.suppress(FileNotFoundError):
            _path(folder, injected.node, injected.fault).unlink()


def is_current(folder: Folder, injected: Injected) -> bool:
    now = _read(_path(folder, injected.node, injected.fault))
    return now is not None and now.mark == injected.mark


def injected_into(folder: Folder, node: str) -> list[Injected]:
    """All that lasts on a node, the oldest first; a file that cannot be understood stands for nothing."""
    found = (_read(path) for path in folder.faults(node).glob("*.json"))
    return sorted((one for one in found if one is not None and not _is_over(one)), key=lambda one: one.at)


def _is_over(one: Injected) -> bool:
    """A worker that hangs does so until it is ended, by its run or with its job."""
    if one.fault != "worker-hang" or "pid" not in one.undo:
        return False
    return not Process(int(one.undo["pid"]), int(one.undo["start"])).alive()


def record_path(folder: Folder, injected: Injected) -> Path:
    return _path(folder, injected.node, injected.fault)


def remember(folder: Folder, node: str, what: str, at: float) -> None:
    """That it was done on purpose, for whoever asks later why: what lasts is forgotten when it is over. Where it cannot
    be written the fault is there all the same."""
    with contextlib.suppress(DalsegnoError, OSError):
        make_folder(folder.faults(node))
        with (folder.faults(node) / HISTORY).open("a") as file:
            file.write(json.dumps([at, what]) + "\n")


def remembered(folder: Folder, node: str) -> list[tuple[float, str]]:
    """When what was injected; a line that a crash has cut off stands for nothing."""
    found = []
    for line in (read_text(folder.faults(node) / HISTORY) or "").splitlines():
        with contextlib.suppress(ValueError, TypeError):
            at, what = json.loads(line)
            found.append((float(at), str(what)))
    return found


def _path(folder: Folder, node: str, fault: str) -> Path:
    return folder.faults(node) / f"{fault}.json"


def _read(path: Path) -> Injected | None:
    with contextlib.suppress(DalsegnoError, OSError, TypeError):
        value = read_json(path)
        return Injected(**value) if isinstance(value, dict) else None  # type: ignore[arg-type]
    return None
