"""The settings of an image, as files inside the image, and the store's records of images.

The files have Enroot's formats: Enroot and Pyxis can run Dal Segno's images, and Dal Segno's plugin can run Enroot's.

- `/etc/environment`: one line `NAME=VALUE` for each ENV.
- `/etc/rc`: a shell script. The first line that begins with `cd "` has the WORKDIR between the quotes, with `\\`
  before each `"`, `$`, `` ` `` and `\\`. The last lines run ENTRYPOINT with CMD, or with the arguments given.
- `/etc/rc.local`: only a comment; `/etc/rc` sources it before it runs the program.
- `/etc/fstab`: the volumes.

These files replace files with the same names in the layers.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from dalsegno.containers.manifest import Config, DamagedImage
from dalsegno.containers.tar import TarEntry, TarType
from dalsegno.errors import CommandFailed, DalsegnoError
from dalsegno.system.files import read_text, write_atomic
from dalsegno.system.machine import program
from dalsegno.system.processes import Runner, through

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SPECIAL = re.compile(r'(["$`\\])')
_CD = re.compile(r'^cd "((?:[^"\\]|\\.)*)"', re.MULTILINE)
_PROGRAM = re.compile(r'if \[ \$# -gt 0 \]; then\n\s+exec (.*)"\$@"\nelse\n\s+exec (.*)\nfi\s*\Z', re.DOTALL)
_RC_LOCAL = "# Read by /etc/rc when the container starts; it may change the command.\n"


def render_files(config: Config) -> dict[str, str]:
    """Return the text of each settings file, by its path in the image."""
    return {
        "etc/environment": "".join(f"{each}\n" for each in config.env if _is_line(each)),
        "etc/rc": _rc(config),
        "etc/rc.local": _RC_LOCAL,
        "etc/fstab": "".join(_volume(each) for each in config.volumes if _is_plain(each)),
    }


def render_layer(config: Config) -> tuple[list[TarEntry], bytes]:
    """Return the settings files as the top layer: its entries, and the content that their offsets refer to."""
    entries, content = [], b""
    for path, text in render_files(config).items():
        data = text.encode("utf-8", "surrogateescape")
        entries.append(
            TarEntry(path, TarType.FILE, 0o755 if path == "etc/rc" else 0o644, size=len(data), offset=len(content))
        )
        content += data
    return entries, content


def usable_workdir(config: Config) -> str:
    """Return the folder in which the image's program starts; "/" if the WORKDIR cannot be written into a script."""
    path = config.workdir
    usable = path.startswith("/") and path.isprintable() and ".." not in path.split("/") and len(path) < 4096
    return path if usable else "/"


def _rc(config: Config) -> str:
    labels = "".join(f"# {key} {value}\n" for key, value in config.labels if _is_line(f"{key}{value}"))
    here = _SPECIAL.sub(r"\\\1", usable_workdir(config))
    entrypoint = "".join(f"{shlex.quote(word)} " for word in config.entrypoint)
    cmd = config.cmd if config.cmd or config.entrypoint else ("/bin/sh",)
    return (
        f"{labels}\n" * bool(labels)
        + f'mkdir -p "{here}" 2> /dev/null\n'
        + f'cd "{here}" && unset OLDPWD || exit 1\n\n'
        + "if [ -s /etc/rc.local ]; then\n    . /etc/rc.local\nfi\n\n"
        + f'if [ $# -gt 0 ]; then\n    exec {entrypoint}"$@"\n'
        + f"else\n    exec {entrypoint}{shlex.join(cmd)}\nfi\n"
    )


def _is_line(text: str) -> bool:
    return "\n" not in text and "\0" not in text and "\r" not in text


def _is_plain(path: str) -> bool:
    return re.fullmatch(r"/[A-Za-z0-9_./@%+=~-]*", path) is not None


def _volume(path: str) -> str:
    return f"${{ENROOT_ROOTFS}}{path} {path} none x-create=dir,bind,rw,nosuid,nodev\n"


def parse_environment(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {name: value for name, equals, value in pairs if equals and _NAME.fullmatch(name)}


def parse_workdir(rc: str) -> str:
    found = _CD.search(rc)
    return re.sub(r"\\(.)", r"\1", found[1]) if found else "/"


def parse_program(rc: str) -> tuple[list[str], list[str]]:
    """Return ENTRYPOINT and CMD; both are empty if the script has another form."""
    found = _PROGRAM.search(rc)
    try:
        entrypoint, both = (shlex.split(each) for each in found.groups()) if found else ([], [])
    except ValueError:
        return [], []
    return (entrypoint, both[len(entrypoint) :]) if both[: len(entrypoint)] == entrypoint else ([], [])


# The store's records: JSON files beside the images


@dataclass(frozen=True)
class ImageRecord:
    """One .sqsh file in the store."""

    digest: str  # the digest of the image's manifest, as in registries
    compression: str
    size: int
    sha256: str  # the SHA-256 of the .sqsh file
    imported: float  # time of the import, in seconds since 1970
    arch: str = ""
    created: str = ""
    layers: tuple[str, ...] = ()  # digests of the layers
    env: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    workdir: str = "/"

    @property
    def hex(self) -> str:
        return self.digest.partition(":")[2]


@dataclass(frozen=True)
class Tag:
    """A name, and the image that it referred to at the last lookup."""

    name: str
    digest: str
    compression: str
    arch: str
    seen: float


@dataclass(frozen=True)
class WrittenImage:
    """A .sqsh file that was written outside the store, with `-o FILE`."""

    path: str
    name: str  # the image or folder that the file was made from
    sha256: str


def with_config(record: ImageRecord, config: Config, workdir: str) -> ImageRecord:
    return replace(
        record, arch=config.arch, created=config.created, env=config.env, entrypoint=config.entrypoint, cmd=config.cmd,
        workdir=workdir,
    )  # fmt: skip


def write(path: Path, value: ImageRecord | Tag | WrittenImage) -> None:
    write_atomic(path, json.dumps(asdict(value), indent=1) + "\n", 0o644)


def read_record(path: Path) -> ImageRecord | None:
    """Return a record; None if it is missing or invalid. An image without a record does not count as stored."""
    value = _read(path)
    names = {each.name for each in fields(ImageRecord)}
    if value is None or not {"digest", "compression", "size", "sha256", "imported"} <= set(value):
        return None
    known = {key: tuple(each) if isinstance(each, list) else each for key, each in value.items() if key in names}
    return ImageRecord(**known)  # type: ignore[arg-type]


def read_tag(path: Path) -> Tag | None:
    value = _read(path)
    if value is None or not {each.name for each in fields(Tag)} <= set(value):
        return None
    return Tag(**{each.name: value[each.name] for each in fields(Tag)})  # type: ignore[arg-type]


def read_written(path: Path) -> WrittenImage | None:
    value = _read(path)
    if value is None or not all(isinstance(value.get(each.name), str) for each in fields(WrittenImage)):
        return None
    return WrittenImage(**{each.name: str(value[each.name]) for each in fields(WrittenImage)})


def _read(path: Path) -> dict[str, object] | None:
    try:
        value = json.loads(read_text(path) or "null")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# Read the settings from any image file


_MAX_BYTES = 1 << 20  # limit for one settings file in an image


@dataclass(frozen=True)
class ImageContents:
    """The settings that a program in the image runs with."""

    env: dict[str, str]
    workdir: str
    entrypoint: list[str]
    cmd: list[str]


def inspect_image(path: Path, runner: Runner) -> ImageContents:
    """Read the settings that Enroot or Dal Segno wrote into an image; missing files count as empty."""
    path = Path(os.path.abspath(path))  # a name that begins with `-` would be read as an option
    tool = _tool()
    runner.run([tool, "-s", str(path)]).checked(hint=f"{path} is not a squashfs image, or is damaged")
    environment, rc = (_text_in(path, name, tool) for name in ("etc/environment", "etc/rc"))
    return ImageContents(parse_environment(environment), parse_workdir(rc), *parse_program(rc))


def _text_in(path: Path, name: str, tool: str) -> str:
    """Return the text of a file in an image; "" if there is none. Raise if the image is truncated or damaged."""
    data = b""
    try:
        for chunk in through([tool, "-cat", str(path), name], ()):
            data += chunk
            if len(data) > _MAX_BYTES:
                raise DamagedImage(f"{name} in {path} is longer than {_MAX_BYTES >> 20} MiB")
    except CommandFailed as error:
        if "FATAL ERROR" in error.stderr:
            why = next(line for line in error.stderr.splitlines() if line.strip())
            raise DalsegnoError(
                f"{path} is damaged: {why}", hint="copy or import it again; `dalsegno image verify` checks all of it"
            ) from error
    return data.decode("utf-8", "surrogateescape")


def check_squashfs(path: Path, runner: Runner) -> str:
    """Decompress every byte of an image without storing it; return the error, or "". lz4 has no checksums, so some
    damage is not found."""
    file = os.path.abspath(path)
    done = runner.run([_tool(), "-quiet", "-no-progress", "-strict-errors", "-pf", "/dev/null", file])
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    return "" if done.exit_code == 0 else (errors or [f"unsquashfs exited with {done.exit_code}"])[-1]


def _tool() -> str:
    tool = program("unsquashfs")
    if tool is None:
        raise DalsegnoError("`unsquashfs` is not installed", hint="install squashfs-tools")
    return tool
