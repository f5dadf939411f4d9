"""What an image file says of itself, whoever made it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dalsegno.containers.damage import DamagedImage
from dalsegno.containers.metadata import parse_environment, parse_program, parse_workdir
from dalsegno.errors import CommandFailed, DalsegnoError
from dalsegno.system.machine import program
from dalsegno.system.pipes import through
from dalsegno.system.processes import Runner

_MOST = 1 << 20  # no image's settings are longer


@dataclass(frozen=True)
class Inside:
    """What a program in it would find."""

    env: dict[str, str]
    workdir: str
    entrypoint: list[str]
    cmd: list[str]


def look_inside(path: Path, runner: Runner) -> Inside:
    """Read the files that Enroot and we put into an image; those it lacks are empty."""
    path = Path(os.path.abspath(path))  # one that begins with `-` would be an option
    tool = _tool()
    runner.run([tool, "-s", str(path)]).checked(hint=f"{path} is no squashfs image, or is damaged")
    environment, rc = (_text_in(path, name, tool) for name in ("etc/environment", "etc/rc"))
    return Inside(parse_environment(environment), parse_workdir(rc), *parse_program(rc))


def _text_in(path: Path, name: str, tool: str) -> str:
    """Of a file that the image lacks: "". An image that is cut off has a good first block, and no more."""
    data = b""
    try:
        for chunk in through([tool, "-cat", str(path), name], ()):
            data += chunk
            if len(data) > _MOST:
                raise DamagedImage(f"{name} in {path} is longer than {_MOST >> 20} MiB")
    except CommandFailed as error:
        if "FATAL ERROR" in error.stderr:
            why = next(line for line in error.stderr.splitlines() if line.strip())
            raise DalsegnoError(
                f"{path} is damaged: {why}", hint="copy or import it again; `dalsegno image verify` checks all of it"
            ) from error
    return data.decode("utf-8", "surrogateescape")


def read_through(path: Path, runner: Runner) -> str:
    """Unpack every byte, and keep none: what is wrong, or "". Of lz4 not every change is seen: it has no checksums."""
    file = os.path.abspath(path)
    done = runner.run([_tool(), "-quiet", "-no-progress", "-strict-errors", "-pf", "/dev/null", file])
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return "" if done.exit_code == 0 else (said or [f"unsquashfs ended with {done.exit_code}"])[-1]


def _tool() -> str:
    tool = program("unsquashfs")
    if tool is None:
        raise DalsegnoError("`unsquashfs` is not on this machine", hint="install squashfs-tools")
    return tool
