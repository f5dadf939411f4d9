"""What an image wants when it runs, as files inside it: the same files, in the same form, as Enroot's.

An image of ours so runs under Enroot and Pyxis as it is, and one of theirs under our plugin:

- `/etc/environment`: a line `NAME=VALUE` for each ENV.
- `/etc/rc`: a shell script. The first line that begins with `cd "` names the WORKDIR, between the quotes, with `\\`
  before each `"`, `$`, `` ` `` and `\\`; the last lines run ENTRYPOINT with CMD, or with the arguments there are.
- `/etc/rc.local`: empty but for a comment; `/etc/rc` reads it first.
- `/etc/fstab`: the volumes.

They take the place of files of that name in the layers.
"""

from __future__ import annotations

import re
import shlex

from dalsegno.containers.manifest import Config
from dalsegno.containers.tar_read import Entry, Type

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SPECIAL = re.compile(r'(["$`\\])')
_CD = re.compile(r'^cd "((?:[^"\\]|\\.)*)"', re.MULTILINE)
_PROGRAM = re.compile(r'if \[ \$# -gt 0 \]; then\n\s+exec (.*)"\$@"\nelse\n\s+exec (.*)\nfi\s*\Z', re.DOTALL)
_RC_LOCAL = "# Read by /etc/rc when the container starts; it may change the command.\n"


def files(config: Config) -> dict[str, str]:
    """Path in the image -> text."""
    return {
        "etc/environment": "".join(f"{each}\n" for each in config.env if _is_line(each)),
        "etc/rc": _rc(config),
        "etc/rc.local": _RC_LOCAL,
        "etc/fstab": "".join(_volume(each) for each in config.volumes if _is_plain(each)),
    }


def as_layer(config: Config) -> tuple[list[Entry], bytes]:
    """The same as a layer over all others: its entries, and the stream their offsets lead into."""
    entries, content = [], b""
    for path, text in files(config).items():
        data = text.encode("utf-8", "surrogateescape")
        entries.append(
            Entry(path, Type.FILE, 0o755 if path == "etc/rc" else 0o644, size=len(data), offset=len(content))
        )
        content += data
    return entries, content


def workdir(config: Config) -> str:
    """Where the image's program starts; a folder that could not be written into a script is as good as none."""
    path = config.workdir
    usable = path.startswith("/") and path.isprintable() and ".." not in path.split("/") and len(path) < 4096
    return path if usable else "/"


def _rc(config: Config) -> str:
    labels = "".join(f"# {key} {value}\n" for key, value in config.labels if _is_line(f"{key}{value}"))
    here = _SPECIAL.sub(r"\\\1", workdir(config))
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


# And read back, of any image -----------------------------------------------------------------------------------


def parse_environment(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {name: value for name, equals, value in pairs if equals and _NAME.fullmatch(name)}


def parse_workdir(rc: str) -> str:
    found = _CD.search(rc)
    return re.sub(r"\\(.)", r"\1", found[1]) if found else "/"


def parse_program(rc: str) -> tuple[list[str], list[str]]:
    """ENTRYPOINT and CMD; both empty if the script is of another form."""
    found = _PROGRAM.search(rc)
    try:
        entrypoint, both = (shlex.split(each) for each in found.groups()) if found else ([], [])
    except ValueError:
        return [], []
    return (entrypoint, both[len(entrypoint) :]) if both[: len(entrypoint)] == entrypoint else ([], [])
