"""Build images from a folder or from a Python environment."""

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
from dalsegno.containers.store import ImageStore, ImportProgress, NoProgress, Stored
from dalsegno.containers.tar import CHUNK, TarEntry, TarType
from dalsegno.errors import DalsegnoError, NotThere
from dalsegno.system.files import nameless
from dalsegno.system.machine import program
from dalsegno.system.ownership import folder_beneath, part_of_others, trusted_owners
from dalsegno.system.processes import Runner

_TYPES = {
    stat.S_IFREG: TarType.FILE,
    stat.S_IFDIR: TarType.FOLDER,
    stat.S_IFLNK: TarType.SYMLINK,
    stat.S_IFIFO: TarType.FIFO,
}


class SourceFile(NamedTuple):
    """A file whose content goes into a layer, with the size and inode that it had when it was listed."""

    path: Path
    size: int
    inode: tuple[int, int]
    below: Path  # the root of the listed tree; symbolic links below it are not followed


@dataclass
class BuiltLayer:
    """A layer made from files on this machine. An entry's `offset` is a position in the concatenated contents of all
    files."""

    keep_owners: bool  # whether the files keep their owners; otherwise root owns all of them
    entries: list[TarEntry] = field(default_factory=list)
    sources: list[SourceFile] = field(default_factory=list)
    _offset: int = 0
    _seen: dict[tuple[int, int], str] = field(default_factory=dict)

    def add(self, source: Path, path: str, below: Path | None = None) -> None:
        """Add one file, symbolic link or folder, but not the files in a folder. Sockets and devices are skipped.

        `below` is the root of the tree that is being added.
        """
        try:
            found = source.lstat()
            link = os.readlink(source) if stat.S_ISLNK(found.st_mode) else ""
        except OSError as error:
            raise _unreadable(source, error) from error
        kind = _TYPES.get(stat.S_IFMT(found.st_mode))
        if kind is None:
            return
        uid, gid = (found.st_uid, found.st_gid) if self.keep_owners else (0, 0)
        mtime = min(max(int(found.st_mtime), 0), 0xFFFFFFFF)
        entry = TarEntry(path, kind, stat.S_IMODE(found.st_mode), uid, gid, mtime, link=link)
        if kind is TarType.FILE:
            entry = self._file(entry, source, found, below or source.parent)
        self.entries.append(entry)

    def _file(self, entry: TarEntry, source: Path, found: os.stat_result, below: Path) -> TarEntry:
        inode = (found.st_dev, found.st_ino)
        if found.st_nlink > 1 and inode in self._seen:
            return entry._replace(type=TarType.LINK, link=self._seen[inode])
        self._seen[inode] = entry.path
        self.sources.append(SourceFile(source, found.st_size, inode, below))
        placed = entry._replace(size=found.st_size, offset=self._offset)
        self._offset += found.st_size
        return placed

    def add_tree(self, source: Path, path: str, leave_out: Iterable[str] = ()) -> None:
        """Add a folder and all its contents, except for subfolders whose names match a pattern in `leave_out`."""
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
    """Opens only the files that were listed. Otherwise a user could replace a listed file by a symbolic link, and root
    would copy a secret file into the image.

    The folder of the last file stays open, because the next file is often in it.
    """

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
        file = open(os.open(name, flags, dir_fd=self._folder), "rb", buffering=0)  # noqa: SIM115 - the caller closes it
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
    return DalsegnoError(f"{path} changed while it was read", hint="try again when nothing writes to it")


def make_folder_layer(folder: Path) -> BuiltLayer:
    """Return a layer with a folder's contents as the root file system."""
    if not folder.is_dir():
        raise NotThere(f"no folder {folder}", hint="name the folder that becomes the image's root")
    layer = BuiltLayer(keep_owners=os.geteuid() == 0)
    layer.add_tree(folder, "")
    return layer


def pack(
    layer: BuiltLayer, config: Config, target: Path, compression: str, progress: ImportProgress, own: bool = False
) -> str:
    """Write the image, and return the digest of its content."""
    about, content = image_metadata.render_layer(config)
    merged = merge([layer.entries, about], folders=[image_metadata.usable_workdir(config)])
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
    return DalsegnoError(f"{path} cannot be read: {error.strerror}", hint="make everything in the folder readable")


@dataclass(frozen=True)
class Builder:
    """Builds images into a store or into files."""

    store: ImageStore
    progress: ImportProgress = field(default_factory=NoProgress)
    compression: str = "lz4"

    def build_folder(self, folder: Path, config: Config, output: Path | None, force: bool = False) -> Stored | Path:
        return self.build(make_folder_layer(folder), config, os.path.abspath(folder), output, force)

    def build(self, layer: BuiltLayer, config: Config, name: str, output: Path | None, force: bool) -> Stored | Path:
        """Build the image into the file `output`, or into the store under this name."""
        if output is not None:
            check_target(output, force)
            pack(layer, config, output, self.compression, self.progress)
            self.store.record_file(Path(os.path.abspath(output)), name, digest_of(output, self.progress))
            return output
        with self.store.in_use(), self.store.turn(name, lambda: self.progress.stage(f"waiting for another {name}")):
            return self._into_store(layer, config, name)

    def _into_store(self, layer: BuiltLayer, config: Config, name: str) -> Stored:
        scratch = self.store.image(f"made:{os.getpid()}", self.compression)
        digest = pack(layer, config, scratch, self.compression, self.progress, own=True)
        sha256 = digest_of(scratch, self.progress)
        path = self.store.image(digest, self.compression)
        os.replace(scratch, path)  # may replace a file with this digest, which has the same content
        record = ImageRecord(digest, self.compression, path.stat().st_size, sha256, self.store.clock())
        config = Config(architecture(), config.env, config.entrypoint, config.cmd, config.workdir)
        stored = self.store.put(with_config(record, config, image_metadata.usable_workdir(config)))
        self.store.name(name, architecture(), stored.record)
        return stored


# Images of Python environments: the environment at its own path, its Python, and the libraries of both


PROGRAMS = (
    "sh", "bash", "env", "ls", "cat", "cp", "mv", "mkdir", "rm", "ln", "uname", "hostname", "id", "nproc", "sleep",
    "date", "true", "false", "test", "tee", "head", "tail", "grep", "sed", "wc", "df", "ps", "kill", "which",
    "dirname", "basename",
)  # fmt: skip
_FILES = ("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/ld.so.cache", "/etc/ssl/certs/ca-certificates.crt")
_FOLDERS = {"proc": 0o555, "sys": 0o555, "dev": 0o755, "run": 0o755, "mnt": 0o755, "tmp": 0o1777, "var/tmp": 0o1777}
# glibc loads these libraries while a program runs, so `ldd` does not list them.
_BESIDE_LIBC = ("libgcc_s.so.1", "libnss_dns.so.2", "libnss_files.so.2", "libresolv.so.2")
_TOP_LINKS = ("/bin", "/sbin", "/lib", "/lib64")  # links into /usr on most distributions
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
    """The paths that an environment's Python reports."""

    prefix: Path
    executable: Path
    stdlib: tuple[Path, ...]
    outside: tuple[Path, ...]  # entries of sys.path that are neither in the prefix nor in the standard library


def inspect_python(venv: Path, runner: Runner) -> Python:
    """Ask the environment's own Python for its paths, which works for venv, virtualenv, uv and conda."""
    executable = venv / "bin" / "python"
    if not executable.exists():
        raise NotThere(
            f"{venv} is not a Python environment: it has no bin/python",
            hint="name the folder that `python -m venv` made",
        )
    check_trusted(venv, Path(os.path.realpath(executable)))
    done = runner.run([str(executable), "-I", "-c", _ASK]).checked(hint="its Python does not run; create it again")
    value = json.loads(done.stdout)
    prefix = Path(value["prefix"])
    stdlib = tuple(dict.fromkeys((Path(value["stdlib"]), Path(value["platstdlib"]))))
    known = (prefix, *stdlib)
    outside = [Path(each) for each in value["path"] if each and os.path.isdir(each)]
    return Python(
        prefix, Path(value["executable"]), tuple(each for each in stdlib if each.is_dir()),
        tuple(each for each in outside if not any(each.is_relative_to(place) for place in known)),
    )  # fmt: skip


def check_trusted(*folders: Path) -> None:
    """Raise an error if root runs this process and other users can change a folder from which it runs programs."""
    if os.geteuid() != 0:
        return
    for folder in folders:
        if part := part_of_others(folder, trusted_owners()):
            raise DalsegnoError(
                f"root does not run programs from {folder}: other users can change {part}",
                hint="create the image as the owner of the environment: `sudo -u USER dalsegno image from-venv …`",
            )


def make_venv_config(python: Python) -> Config:
    return Config(
        env=(f"PATH={python.prefix}/bin:{_PATH}", f"VIRTUAL_ENV={python.prefix}", "LANG=C.UTF-8"),
        cmd=("python",),
    )


def make_venv_layer(python: Python, extra: Iterable[Path], runner: Runner) -> BuiltLayer:
    """Return a layer with everything that the environment needs, each file at the same path as on this machine."""
    extra = list(extra)
    if missing := [each for each in extra if not each.is_dir()]:
        raise NotThere(f"no folder {missing[0]}", hint="name existing folders")
    check_trusted(*extra)
    trees = list(dict.fromkeys([python.prefix, *python.stdlib, *extra]))
    layer = _Root(BuiltLayer(keep_owners=False))
    for name, mode in _FOLDERS.items():
        layer.layer.entries.append(TarEntry(name, TarType.FOLDER, mode))
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
    """Adds files from this machine to an image, each once, together with the symbolic links that lead to them."""

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
        """Add a file, and all symbolic links on the path to it. Of a folder, add only the links on the path."""
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
    """Return the shared libraries that this machine's loader finds for all programs and libraries among the files."""
    tool = program("ldd")
    if tool is None:
        raise DalsegnoError("`ldd` is not installed", hint="it comes with the C library: install libc-bin")
    binaries = [str(path) for path in files if _is_elf(path)]
    found: dict[str, None] = {}
    for at in range(0, len(binaries), _AT_ONCE):
        done = runner.run([tool, *binaries[at : at + _AT_ONCE]])  # a failure only means that some files are static
        found.update(dict.fromkeys(_LDD.findall(done.stdout)))
    return (Path(path) for path in found)


def _is_elf(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False
