"""The smallest image that sleeps: one program of this machine's, and the libraries it wants."""

from __future__ import annotations

import os
import re
import tarfile
from pathlib import Path

from dalsegno.containers import parse_name
from dalsegno.containers.importing import Importer
from dalsegno.containers.store import Store
from dalsegno.demo.docker_daemon import Docker
from dalsegno.system.machine import program
from dalsegno.system.processes import LocalRunner, Runner

NAME = "dalsegno-demo:sleep"


def give_to_docker(docker: Docker, folder: Path) -> str:
    """Its name there."""
    path = folder / "sleep.tar"
    write_root(path, LocalRunner())
    docker.ask("import", str(path), NAME)
    return NAME


def take_from_docker(docker: Docker, folder: Path) -> Path:
    """The same image as a .sqsh, as `dalsegno image import dockerd://…` makes it."""
    path = folder / "sleep.sqsh"
    Importer(Store(folder / "images"), runner=docker).to_file(parse_name(f"dockerd://{NAME}"), path)
    path.chmod(0o644)
    return path


def write_root(path: Path, runner: Runner) -> None:
    sleep = program("sleep") or "/bin/sleep"
    with tarfile.open(path, "w", dereference=True) as archive:
        archive.add(sleep, "bin/sleep")
        for library in parse_ldd(runner.run(["ldd", sleep]).stdout):
            archive.add(library, library.lstrip(os.sep))


def parse_ldd(text: str) -> list[str]:
    """Where the libraries are; a program that stands alone has none."""
    return re.findall(r"(?:^|\s)(/\S+) \(0x", text)
