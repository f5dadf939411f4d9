"""Images made here, of a folder or of a Python environment."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from dalsegno.containers import image_metadata
from dalsegno.containers.image_metadata import ImageRecord, with_config
from dalsegno.containers.import_image import digest_of
from dalsegno.containers.manifest import Config, architecture
from dalsegno.containers.merge import merge
from dalsegno.containers.squash import check_target, squash, stream_size, tar_stream
from dalsegno.containers.store import ImageStore, ImportProgress, Silent, Stored
from dalsegno.containers.tar import CHUNK, TarEntry, Type
from dalsegno.errors import DalsegnoError, NotThere
from dalsegno.system.files import nameless
from dalsegno.system.machine import program
from dalsegno.system.ownership import folder_beneath, part_of_others, trusted_owners
from dalsegno.system.processes import Runner

# ---- Files of this machine as a layer, and a .sqsh of them.


_TYPES = {stat.S_IFREG: Type.FILE, stat.S_IFDIR: Type.FOLDER, stat.S_IFLNK: Type.SYMLINK, stat.S_IFIFO: Type.FIFO}


class SourceFile(NamedTuple):
    """A file whose content belongs to a layer, as it was when it was looked at."""

    path: Path
    size: int
    inode: tuple[int, int]
    below: Path  # no link on the way from there to it was followed


@dataclass
class BuiltLayer:
    """Entries whose content are files here, one behind the other as in one stream."""

    own_owners: bool  # keep who owns what; else all is root's
    entries: list[TarEntry] = field(default_factory=list)
    sources: list[SourceFile] = field(default_factory=list)
    _offset: int = 0
    _seen: dict[tuple[int, int], str] = field(default_factory=dict)

    def add(self, source: Path, path: str, below: Path | None = None) -> None:
        """One thing, not what is in it. Sockets and devices are left out. `below`: the folder that all of is added."""
        try:
            found = source.lstat()
            link = os.readlink(source) if stat.S_ISLNK(found.st_mode) else ""
        except OSError as error:
            raise _unreadable(source, error) from error
        kind = _TYPES.get(stat.S_IFMT(found.st_mode))
        if kind is None:
            return
        uid, gid = (found.st_uid, found.st_gid) if self.own_owners else (0, 0)
        mtime = min(max(int(found.st_mtime), 0), 0xFFFFFFFF)
        entry = TarEntry(path, kind, stat.S_IMODE(found.st_mode), uid, gid, mtime, link=link)
        if kind is Type.FILE:
            entry = self._file(entry, source, found, below or source.parent)
        self.entries.append(entry)

    def _file(self, entry: TarEntry, source: Path, found: os.stat_result, below: Path) -> TarEntry:
        inode = (found.st_dev, found.st_ino)
        if found.st_nlink > 1 and inode in self._seen:
            return entry._replace(type=Type.LINK, link=self._seen[inode])
        self._seen[inode] = entry.path
        self.sources.append(SourceFile(source, found.st_size, inode, below))
        placed = entry._replace(size=found.st_size, offset=self._offset)
        self._offset += found.st_size
        return placed

    def add_tree(self, source: Path, path: str, leave_out: Iterable[str] = ()) -> None:
        """A folder and all in it; `leave_out`: folders' names, or patterns of them."""
        skipped = tuple(leave_out)
        for folder, folders, files in os.walk(source, onerror=_raise):
            inside = os.path.relpath(folder, source)
            here = path if inside == "." else f"{path}/{inside}".lstrip("/")
            folders[:] = sorted(name for name in folders if not any(fnmatch(name, each) for each in skipped))
            if here:
                self.add(Path(folder), here, source)
            for name in sorted([*files, *(each for each in folders if os.path.islink(f"{folder}/{each}"))]):
                self.add(Path(folder, name), f"{here}/{name}".lstrip("/"), source)

    def chunks(self) -> Iterator[bytes]:
        with contextlib.closing(_Opener()) as opener:
            for source in self.sources:
                yield from _content(opener, source)


def _content(opener: _Opener, source: SourceFile) -> Iterator[bytes]:
    size = source.size
    try:
        with opener.open(source) as file:
            while size and (chunk := file.read(min(CHUNK, size))):
                size -= len(chunk)
                yield chunk
    except OSError as error:
        raise _unreadable(source.path, error) from error
    if size:
        raise _changed(source.path)


class _Opener:
    """Opens the very files that were looked at: root must not be led to others, which only root can read. The folder of
    the last one stays open, for most of the next are in it."""

    def __init__(self) -> None:
        self._at: tuple[Path, str] | None = None
        self._folder = -1

    def open(self, source: SourceFile) -> io.FileIO:
        folder, name = os.path.split(source.path)
        if self._at != (source.below, folder):
            self.close()
            self._folder = folder_beneath(source.below, folder.removeprefix(str(source.below)).lstrip("/"))
            self._at = (source.below, folder)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = open(os.open(name, flags, dir_fd=self._folder), "rb", buffering=0)  # noqa: SIM115 - the caller's
        about = os.fstat(file.fileno())
        if (about.st_dev, about.st_ino) != source.inode:
            file.close()
            raise _changed(source.path)
        return file

    def close(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
        self._at, self._folder = None, -1


def _changed(path: Path) -> DalsegnoError:
    return DalsegnoError(f"{path} changed while it was read", hint="try again when nobody writes there")


def layer_of(folder: Path) -> BuiltLayer:
    """A root file system that lies in a folder."""
    if not folder.is_dir():
        raise NotThere(f"no folder {folder}", hint="name a folder that holds what shall be the image's root")
    layer = BuiltLayer(own_owners=os.geteuid() == 0)
    layer.add_tree(folder, "")
    return layer


def pack(
    layer: BuiltLayer, config: Config, target: Path, compression: str, progress: ImportProgress, own: bool = False
) -> str:
    """Write the image; gives the digest of what went into it."""
    about, content = image_metadata.as_layer(config)
    merged = merge([layer.entries, about], folders=[image_metadata.workdir(config)])
    progress.stage("packing", stream_size(merged))
    digest = hashlib.sha256()

    def stream() -> Iterator[bytes | memoryview]:
        for piece in tar_stream(merged, [layer.chunks(), iter([content])], progress.advance):
            digest.update(piece)
            yield piece

    with nameless(target, own=own) as handle:
        squash(stream(), handle, compression)
    return f"sha256:{digest.hexdigest()}"


def _raise(error: OSError) -> None:
    raise _unreadable(Path(str(error.filename)), error)


def _unreadable(path: Path, error: OSError) -> DalsegnoError:
    return DalsegnoError(
        f"{path} cannot be read: {error.strerror}", hint="an image holds all of a folder; mend its rights"
    )


# ---- Images made here, of a folder or of a Python environment.


@dataclass(frozen=True)
class Builder:
    """How images are made here."""

    store: ImageStore
    progress: ImportProgress = field(default_factory=Silent)
    compression: str = "lz4"

    def of_folder(self, folder: Path, config: Config, output: Path | None, force: bool = False) -> Stored | Path:
        return self.build(layer_of(folder), config, os.path.abspath(folder), output, force)

    def build(self, layer: BuiltLayer, config: Config, name: str, output: Path | None, force: bool) -> Stored | Path:
        """Into a file, or into the store under this name."""
        if output is not None:
            check_target(output, force)
            pack(layer, config, output, self.compression, self.progress)
            self.store.wrote(Path(os.path.abspath(output)), name, digest_of(output, self.progress))
            return output
        with self.store.in_use(), self.store.turn(name, lambda: self.progress.stage(f"waiting for another {name}")):
            return self._into_store(layer, config, name)

    def _into_store(self, layer: BuiltLayer, config: Config, name: str) -> Stored:
        scratch = self.store.image(f"made:{os.getpid()}", self.compression)
        digest = pack(layer, config, scratch, self.compression, self.progress, own=True)
        sha256 = digest_of(scratch, self.progress)
        path = self.store.image(digest, self.compression)
        os.replace(scratch, path)  # what has the same digest is the same
        record = ImageRecord(digest, self.compression, path.stat().st_size, sha256, self.store.clock())
        config = Config(architecture(), config.env, config.entrypoint, config.cmd, config.workdir)
        stored = self.store.put(with_config(record, config, image_metadata.workdir(config)))
        self.store.name(name, architecture(), stored.record)
        return stored


# ---- A Python environment as an image of its own: the environment where it lies, its Python, and the libraries of
# both.


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


def layer_of_venv(python: Python, extra: Iterable[Path], runner: Runner) -> BuiltLayer:
    """All that the environment needs to run, each thing at the path that it has here."""
    extra = list(extra)
    if missing := [each for each in extra if not each.is_dir()]:
        raise NotThere(f"no folder {missing[0]}", hint="name folders that are here, or leave them out")
    check_trusted(*extra)
    trees = list(dict.fromkeys([python.prefix, *python.stdlib, *extra]))
    layer = _Root(BuiltLayer(own_owners=False))
    for name, mode in _FOLDERS.items():
        layer.layer.entries.append(TarEntry(name, Type.FOLDER, mode))
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

    def __init__(self, layer: BuiltLayer) -> None:
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
