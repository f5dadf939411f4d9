"""Switch off the quick acknowledgement of slurmdbd's small packets on virtual hosts, for comparison."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from stage import ROOT

SIGN = "quickack 1"


def switch_off(cluster: Path) -> None:
    """Replace the routes on both ends of a connection to slurmdbd. They are never restored, because `down` removes them
    anyway."""
    sys.path.insert(0, str(ROOT / "src"))
    from dalsegno.system.hosts import host_process
    from dalsegno.targets.local.folder import Folder

    head = host_process(cluster / "hosts/head")
    if head is None:
        raise RuntimeError("the head is not running")
    _replace_routes(["nsenter", "-t", str(head.pid), "-n"], "eth0")
    _replace_routes([], f"ds{Folder(cluster).id}")


def _replace_routes(enter: Sequence[str], device: str) -> None:
    for line in _ip(enter, "route", "show", "table", "all", "dev", device).splitlines():
        if SIGN in line:
            _ip(enter, "route", "replace", *line.replace(SIGN, "").split(), "dev", device)


def _ip(enter: Sequence[str], *args: str) -> str:
    return subprocess.run([*enter, "ip", *args], capture_output=True, text=True, check=True).stdout
