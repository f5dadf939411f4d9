"""Evidence about a node, saved before it is reset, rebooted or replaced: a folder of text files, written atomically."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from dalsegno.system.files import explain, make_folder, read_text, sync_folder

MAX_KEPT = 20  # maximum number of bundles per node; the oldest are removed
INCOMPLETE = "incomplete.txt"  # this file of a bundle lists the sources that failed, and why
ACTION = "action.txt"  # this file of a bundle has the id of the action that saved it


def merge_evidence(*sources: Mapping[str, str]) -> dict[str, str]:
    """Return the files of several sources as one bundle, with the sources' notes about missing parts joined."""
    files = {name: text for source in sources for name, text in source.items()}
    gaps = [source[INCOMPLETE].strip() for source in sources if INCOMPLETE in source]
    return {**files, INCOMPLETE: "\n".join([*gaps, ""])} if gaps else files


def is_empty(source: Mapping[str, str]) -> bool:
    return not set(source) - {INCOMPLETE}


def save_evidence(root: Path, node: str, files: Mapping[str, str], at: float, action: str = "") -> Path:
    """Write a bundle below `root/NODE` and return its folder. After a crash, the bundle is complete or absent.

    `action` is the id of the action that saves the bundle. An action repeated after a crash replaces its own bundle.
    """
    own = root / node
    make_folder(own, 0o700)
    path = _free_name(own, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at)), action)
    files = {**files, ACTION: action} if action else files
    temp = own / f".{path.name}.{os.getpid()}.tmp"
    try:
        _clear(temp)
        temp.mkdir(mode=0o700)
        for name, text in files.items():
            with open(temp / Path(name).name, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        sync_folder(temp)
        _clear(path)
        os.rename(temp, path)
        sync_folder(own)
    except OSError as error:
        _clear(temp)
        raise explain(error, path) from error
    _drop_old(own)
    return path


def _free_name(own: Path, name: str, action: str) -> Path:
    """Return the path for a bundle: that of an earlier bundle of the same action, or an unused one. Bundles of the same
    second get numbers."""
    paths = (own / each for each in (name, *(f"{name}-{number}" for number in range(2, 1000))))
    return next(path for path in paths if not path.exists() or (action and read_text(path / ACTION) == action))


def _clear(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _drop_old(own: Path) -> None:
    bundles = sorted(path for path in own.iterdir() if not path.name.startswith("."))
    leftovers = [path for path in own.iterdir() if path.name.endswith(".tmp")]
    for path in [*bundles[:-MAX_KEPT], *leftovers]:
        shutil.rmtree(path, ignore_errors=True)
