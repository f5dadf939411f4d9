"""What an image file says of itself, whoever made it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dalsegno.containers.metadata import parse_environment, parse_program, parse_workdir
from dalsegno.errors import DalsegnoError
from dalsegno.system.machine import program
from dalsegno.system.processes import Runner


@dataclass(frozen=True)
class Inside:
    """What a program in it would find."""

    env: dict[str, str]
    workdir: str
    entrypoint: list[str]
    cmd: list[str]


def look_inside(path: Path, runner: Runner) -> Inside:
    """Read the files that Enroot and we put into an image; those it lacks are empty."""
    tool = _tool()
    runner.run([tool, "-s", str(path)]).checked(hint=f"{path} is no squashfs image, or is damaged")
    environment, rc = (_text_in(path, name, tool, runner) for name in ("etc/environment", "etc/rc"))
    return Inside(parse_environment(environment), parse_workdir(rc), *parse_program(rc))


def _text_in(path: Path, name: str, tool: str, runner: Runner) -> str:
    """Of a file that the image lacks: "". An image that is cut off has a good first block, and no more."""
    done = runner.run([tool, "-cat", str(path), name])
    if "FATAL ERROR" in done.stderr:
        why = next(line for line in done.stderr.splitlines() if line.strip())
        raise DalsegnoError(
            f"{path} is damaged: {why}", hint="copy or import it again; `dalsegno image verify` reads all"
        )
    return done.stdout


def read_through(path: Path, runner: Runner) -> str:
    """Unpack every byte, and keep none: what is wrong, or "". Of lz4 not every change is seen: it has no checksums."""
    done = runner.run([_tool(), "-quiet", "-no-progress", "-strict-errors", "-pf", "/dev/null", str(path)])
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return "" if done.exit_code == 0 else (said or [f"unsquashfs ended with {done.exit_code}"])[-1]


def _tool() -> str:
    tool = program("unsquashfs")
    if tool is None:
        raise DalsegnoError("`unsquashfs` is not on this machine", hint="install squashfs-tools")
    return tool
