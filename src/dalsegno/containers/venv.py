"""A Python environment as an image of its own: the environment where it lies, its Python, and the libraries of both.

Nothing else is needed to run it but a few small programs (`PROGRAMS`), so that the image is as small as the
environment, and no node reads thousands of small files from shared storage when a job starts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dalsegno.containers.folder import Layer
from dalsegno.containers.manifest import Config
from dalsegno.containers.tar_read import Entry, Type
from dalsegno.errors import DalsegnoError, NotThere
from dalsegno.system.machine import program
from dalsegno.system.ownership import part_of_others, trusted_owners
from dalsegno.system.processes import Runner

PROGRAMS = (
    "sh", "bash", "env", "ls", "cat", "cp", "mv", "mkdir", "rm", "ln", "uname", "hostname", "id", "nproc", "sleep",
    "date", "true", "false", "test", "tee", "head", "tail", "grep", "sed", "wc", "df", "ps", "kill", "which",
    "dirname", "basename",
)  # fmt: skip
_FILES = ("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/ld.so.cache", "/etc/ssl/certs/ca-certificates.crt")
_FOLDERS = {"proc": 0o555, "sys": 0o555, "dev": 0o755, "run": 0o755, "mnt": 0o755, "tmp": 0o1777, "var/tmp": 0o1777}
_BESIDE_LIBC = ("libgcc_s.so.1", "libnss_dns.so.2", "libnss_files.so.2", "libresolv.so.2")  # loaded only when used
_TOP_LINKS = ("/bin", "/sbin", "/lib", "/lib64")  # into /usr, on most machines of today
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ASK = (
    "import json, site, sys, sysconfig;"
    "print(json.dumps({'prefix': sys.prefix, 'stdlib': sysconfig.get_path('stdlib'), 'path': sys.path,"
    "'platstdlib': sysconfig.get_path('platstdlib'), 'base': sys.base_prefix, 'executable': sys.executable}))"
)
_NOT_OF_STDLIB = ("site-packages", "dist-packages", "test", "tests", "idlelib", "config-*", "ensurepip")
_LDD = re.compile(r"^\s+(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)
_AT_ONCE = 200


@dataclass(frozen=True)
class Python:
    """What an environment's Python says of itself."""

    prefix: Path
    executable: Path
    stdlib: tuple[Path, ...]
    outside: tuple[Path, ...]  # on its path, but in neither


def ask(venv: Path, runner: Runner) -> Python:
    """The environment's own Python is asked, so that any kind of one will do: venv, virtualenv, uv, conda."""
    executable = venv / "bin" / "python"
    if not executable.exists():
        raise NotThere(
            f"{venv} is no Python environment: it has no bin/python", hint="name the folder that `python -m venv` made"
        )
    check_trusted(venv, Path(os.path.realpath(executable)))
    said = runner.run([str(executable), "-I", "-c", _ASK]).checked(hint="its Python does not run; make it again")
    value = json.loads(said.stdout)
    prefix = Path(value["prefix"])
    stdlib = tuple(dict.fromkeys((Path(value["stdlib"]), Path(value["platstdlib"]))))
    known = (prefix, *stdlib)
    outside = [Path(each) for each in value["path"] if each and os.path.isdir(each)]
    return Python(
        prefix, Path(value["executable"]), tuple(each for each in stdlib if each.is_dir()),
        tuple(each for each in outside if not any(each.is_relative_to(place) for place in known)),
    )  # fmt: skip


def check_trusted(*folders: Path) -> None:
    """Root runs the environment's own Python, and has the loader look at its programs: none may be another user's."""
    if os.geteuid() != 0:
        return
    for folder in folders:
        if part := part_of_others(folder, trusted_owners()):
            raise DalsegnoError(
                f"root does not run programs from {folder}: other users can change {part}",
                hint="create the image as the owner of the environment: `sudo -u USER dalsegno image from-venv …`",
            )


def config_of(python: Python) -> Config:
    return Config(
        env=(f"PATH={python.prefix}/bin:{_PATH}", f"VIRTUAL_ENV={python.prefix}", "LANG=C.UTF-8"),
        cmd=("python",),
    )


def layer_of_venv(python: Python, extra: Iterable[Path], runner: Runner) -> Layer:
    """All that the environment needs to run, each thing at the path that it has here."""
    extra = list(extra)
    if missing := [each for each in extra if not each.is_dir()]:
        raise NotThere(f"no folder {missing[0]}", hint="name folders that are here, or leave them out")
    check_trusted(*extra)
    trees = list(dict.fromkeys([python.prefix, *python.stdlib, *extra]))
    layer = _Root(Layer(own_owners=False))
    for name, mode in _FOLDERS.items():
        layer.layer.entries.append(Entry(name, Type.FOLDER, mode))
    for tree in trees:
        layer.tree(tree, () if tree in (python.prefix, *extra) else _NOT_OF_STDLIB)
    layer.path(python.executable)
    for top in _TOP_LINKS:
        if os.path.islink(top):
            layer.path(Path(top))
    for name in PROGRAMS:
        found = program(name)
        if found:
            layer.path(Path(found))
    for file in _FILES:
        if os.access(file, os.R_OK):
            layer.path(Path(file))
    for library in _libraries([source.path for source in layer.layer.sources], runner):
        layer.path(library)
        if library.name.startswith("libc.so"):
            for beside in _BESIDE_LIBC:
                if (library.parent / beside).exists():
                    layer.path(library.parent / beside)
    return layer.layer


class _Root:
    """Paths of this machine in an image, each once, with the links on the way to them."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self._there: set[str] = set()

    def tree(self, folder: Path, leave_out: Iterable[str]) -> None:
        self.path(folder)
        before = len(self.layer.entries)
        inside = str(folder.resolve())[1:]
        self.layer.add_tree(folder.resolve(), inside, leave_out)
        self._there.update(f"/{entry.path}" for entry in self.layer.entries[before:])

    def path(self, path: Path) -> None:
        """A file, and every symbolic link that leads to it, in the folders above it too."""
        done = Path("/")
        for part in path.parts[1:]:
            step = done / part
            if step.is_symlink():
                if str(step) not in self._there:
                    self._there.add(str(step))
                    self.layer.add(step, str(step)[1:])
                self.path(Path(os.path.normpath(done / os.readlink(step))))
                step = step.resolve()
            done = step
        if done.is_file() and str(done) not in self._there:
            self._there.add(str(done))
            self.layer.add(done, str(done)[1:])


def _libraries(files: list[Path], runner: Runner) -> Iterator[Path]:
    """The shared libraries of all programs and libraries among the files, as the loader here finds them."""
    tool = program("ldd")
    if tool is None:
        raise DalsegnoError("`ldd` is not on this machine", hint="it comes with the C library: install libc-bin")
    binaries = [str(path) for path in files if _is_elf(path)]
    found: dict[str, None] = {}
    for at in range(0, len(binaries), _AT_ONCE):
        said = runner.run([tool, *binaries[at : at + _AT_ONCE]])  # its code tells only that some are static
        found.update(dict.fromkeys(_LDD.findall(said.stdout)))
    return (Path(path) for path in found)


def _is_elf(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False
