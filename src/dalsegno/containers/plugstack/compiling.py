"""Our plugin, compiled on a host of the cluster: there are its Slurm's headers, and its C library."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.containers.native import BUILD_FLAGS, PARTS, not_compiled, source_folder
from dalsegno.containers.plugstack.asking import script
from dalsegno.containers.plugstack.ways import Way, last_words, send
from dalsegno.errors import DalsegnoError
from dalsegno.system.processes import Runner

PARCEL, COMMAND, SAID, SLURM = "ds:parcel ", "ds:command ", "ds:said ", "ds:slurm "


@dataclass(frozen=True)
class Parcel:
    """Files for `install.sh`: an archive in base64, and what tells that it came whole."""

    data: str
    sha256: str


def compile_on(runner: Runner, ways: Sequence[Way], host: str) -> Parcel:
    """In the first way that leads there."""
    programs = [" ".join([*BUILD_FLAGS, *words, "-o", f"out/{name}"]) for name, words in PARTS.items()]
    words = ["sh", "-c", script("compile.sh"), "dalsegno", *programs]
    failed = []
    for way in ways:
        done = send(runner, way, host, words, pack(sorted(source_folder().glob("*.[ch]"))).data)
        if found := _told(done.stdout, PARCEL):
            return parcel(base64.b64decode(found[0]))
        if command := _told(done.stdout, COMMAND):
            raise not_compiled("".join(_told(done.stdout, SLURM)), command[0], _told(done.stdout, SAID), host)
        failed.append(f"{way.name}: {last_words(done)}")
    raise DalsegnoError(
        f"our Slurm plugin could not be compiled on {host}: {'; '.join(failed)}",
        hint="it takes gcc and the headers of its Slurm (Debian: gcc libc6-dev libslurm-dev; elsewhere slurm-devel)",
    )


def _told(answer: str, word: str) -> list[str]:
    return [line.removeprefix(word) for line in answer.splitlines() if line.startswith(word)]


def pack(files: Sequence[Path]) -> Parcel:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for path in files:
            entry = tarfile.TarInfo(path.name)
            entry.size, entry.mode = path.stat().st_size, 0o755
            with open(path, "rb") as file:
                archive.addfile(entry, file)
    return parcel(stream.getvalue())


def parcel(archive: bytes) -> Parcel:
    return Parcel(base64.b64encode(archive).decode(), hashlib.sha256(archive).hexdigest())
