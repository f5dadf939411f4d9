"""Doing repairs: each step may be done again, so a way that failed half-way is followed by the next."""

from __future__ import annotations

import base64
import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dalsegno.containers.plugstack.asking import TIMEOUT_S, Way, last_words, script, send
from dalsegno.containers.plugstack.repairs import Repair
from dalsegno.errors import DalsegnoError
from dalsegno.system.processes import Completed, Runner

HINT = "as root: `sudo dalsegno containers check --repair`"
OPEN = 'for each in "$@"; do mkdir -p "$each" && chmod 1777 "$each" || exit 1; done; echo ds:done'
RESTART = "if systemctl is-active -q slurmd 2>/dev/null; then systemctl restart slurmd; fi; echo ds:done"
DONE = "ds:done"  # srun ends with 0 where a step could not start for the node's plugins: only this word counts
Step = tuple[list[str], str | None]  # a command, and what it reads


def mend_here(runner: Runner, env: Mapping[str, str], repair: Repair, parcel: str) -> None:
    for words, stdin in steps(repair, parcel):
        runner.run(words, stdin=stdin, env=env, timeout_s=TIMEOUT_S).checked(hint=HINT)


def mend_node(runner: Runner, ways: Sequence[Way], repair: Repair, parcel: str) -> None:
    """In the first way that leads there and may do it."""
    failed = []
    for way in ways:
        if repair.host in way.closed:
            failed.append(way.closed[repair.host])
            continue
        bad = next((done for done in _sent(runner, way, repair, parcel) if DONE not in done.stdout), None)
        if bad is None:
            return
        failed.append(f"{way.name}: {last_words(bad)}")
    raise DalsegnoError(f"{repair.host} could not be mended: {'; '.join(failed)}", hint=HINT)


def _sent(runner: Runner, way: Way, repair: Repair, parcel: str) -> Iterator[Completed]:
    """One step after the other; whoever reads them stops at one that failed."""
    for words, stdin in steps(repair, parcel):
        yield send(runner, way, repair.host, words, stdin)


def steps(repair: Repair, parcel: str) -> Iterator[Step]:
    if repair.install:
        kept = [f"{repair.install.rpartition('/')[0]}/{name}" for name in ("kept", "unpacked")]
        yield ["sh", "-c", script("install.sh"), "dalsegno", repair.install, *kept], parcel
    for file in dict.fromkeys([*(line.file for line in repair.drop), *([repair.file] if repair.add else [])]):
        out_of_use = [line.text for line in repair.drop if line.file == file]
        added = repair.add if file == repair.file else ""
        yield ["sh", "-c", script("stack.sh"), "dalsegno", file, added, *out_of_use], None
    if repair.folders:
        yield ["sh", "-c", OPEN, "dalsegno", *repair.folders], None
    if repair.restart:
        yield ["sh", "-c", RESTART], None


def pack(folder: Path) -> str:
    """Our plugin's files for `install.sh`."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            entry = tarfile.TarInfo(path.name)
            entry.size, entry.mode = path.stat().st_size, 0o755
            with open(path, "rb") as file:
                archive.addfile(entry, file)
    return base64.b64encode(stream.getvalue()).decode()
